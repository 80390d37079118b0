//! The folder: whose it is, in which format, and by whom it is held.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use crate::format::FORMAT;

const MARKER: &str = "FORMAT";
const LOCK: &str = "lock";
const PREFIX: &str = "leasehold-disk ";

/// Why a store could not be opened.
#[derive(Debug)]
pub enum OpenError {
    /// Another process, or another store of this one, holds the folder.
    Held {
        folder: PathBuf,
    },
    /// The folder has files of something else in it.
    Foreign {
        folder: PathBuf,
        found: String,
    },
    /// Written in a format that this version does not know.
    Format {
        folder: PathBuf,
        found: String,
    },
    /// Something in the store cannot be decoded.
    Corrupt {
        folder: PathBuf,
        what: String,
    },
    Io {
        folder: PathBuf,
        error: std::io::Error,
    },
    Engine {
        folder: PathBuf,
        error: fjall::Error,
    },
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::Held { folder } => write!(
                f,
                "{} is in use by another process: a store's folder is served by one process at a time; \
                 stop the other one, or give this one another folder",
                folder.display()
            ),
            OpenError::Foreign { folder, found } => write!(
                f,
                "{} is not a store, and it is not empty ({found} is in it): give an empty or new folder",
                folder.display()
            ),
            OpenError::Format { folder, found } => write!(
                f,
                "{} is in the format {found:?}, and this version reads only {:?}: \
                 open it with the version that wrote it, or a newer one",
                folder.display(),
                format!("{PREFIX}{FORMAT}")
            ),
            OpenError::Corrupt { folder, what } => {
                write!(f, "{} is damaged: {what}; restore it from a backup", folder.display())
            }
            OpenError::Io { folder, error } => write!(f, "{} cannot be used: {error}", folder.display()),
            OpenError::Engine { folder, error } => write!(f, "{} cannot be opened: {error}", folder.display()),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OpenError::Io { error, .. } => Some(error),
            OpenError::Engine { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// A folder that is ours as long as this lives.
#[derive(Debug)]
pub(crate) struct Folder {
    pub path: PathBuf,
    lock: File,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Closing would do, but for a child process that was being started just now: until it runs its
        // own program it has our files open. If this fails, closing is what is left.
        let _ = self.lock.unlock();
    }
}

impl Folder {
    pub(crate) fn hold(path: &Path) -> Result<Folder, OpenError> {
        let io = |error| OpenError::Io { folder: path.to_owned(), error };
        create(path).map_err(io)?;
        // Looked at before anything is put there.
        let found = marker(path).map_err(io)?;
        if found.is_none()
            && let Some(found) = foreign(path).map_err(io)?
        {
            return Err(OpenError::Foreign { folder: path.to_owned(), found });
        }
        let lock =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path.join(LOCK)).map_err(io)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => OpenError::Held { folder: path.to_owned() },
            TryLockError::Error(error) => io(error),
        })?;
        // Again, under the lock: another process may have made it meanwhile.
        match marker(path).map_err(io)? {
            None => write_marker(path).map_err(io)?,
            Some(found) if found.trim_end() == format!("{PREFIX}{FORMAT}") => {}
            Some(found) => {
                let found = found.lines().next().unwrap_or_default().to_owned();
                return Err(OpenError::Format { folder: path.to_owned(), found });
            }
        }
        Ok(Folder { path: path.to_owned(), lock })
    }

    pub(crate) fn db(&self) -> PathBuf {
        self.path.join("db")
    }

    /// Makes certain that what was made in the folder is found there after a power cut.
    pub(crate) fn sync(&self) -> Result<(), OpenError> {
        sync(&self.path).map_err(|error| OpenError::Io { folder: self.path.clone(), error })
    }
}

/// Makes the folder and those above it, so that they outlive a power cut: a folder's name is in the
/// folder above.
fn create(path: &Path) -> std::io::Result<()> {
    let path = std::path::absolute(path)?;
    let missing: Vec<&Path> = path.ancestors().take_while(|p| !p.exists()).collect();
    std::fs::create_dir_all(&path)?;
    missing.iter().filter_map(|p| p.parent()).try_for_each(sync)
}

fn sync(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

fn marker(path: &Path) -> std::io::Result<Option<String>> {
    match File::open(path.join(MARKER)) {
        Ok(file) => {
            let mut text = Vec::new();
            file.take(200).read_to_end(&mut text)?;
            Ok(Some(String::from_utf8_lossy(&text).into_owned()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What is in a folder that has no marker, besides what an interrupted first opening leaves.
fn foreign(path: &Path) -> std::io::Result<Option<String>> {
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != LOCK && name != format!("{MARKER}.new") && name != "lost+found" {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn write_marker(path: &Path) -> std::io::Result<()> {
    let new = path.join(format!("{MARKER}.new"));
    let mut file = File::create(&new)?;
    writeln!(file, "{PREFIX}{FORMAT}")?;
    file.sync_all()?;
    std::fs::rename(&new, path.join(MARKER))?;
    sync(path)
}
