//! The folder: whose it is, in which format, and by whom it is held.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use crate::format::FORMAT;
use crate::journal::Place;
use crate::tree::Broken;

const MARKER: &str = "FORMAT";
const LOCK: &str = "lock";
const PROBE: &str = "probe";
const PREFIX: &str = "leasehold-disk ";
/// The folders in it: the journal, and the trees.
pub(crate) const FOLDERS: [&str; 4] = ["journal", "records", "bytes", "small"];
/// What has to be written before a disk that failed is believed.
const PROBE_BYTES: usize = 1024 * 1024;

/// Why a store could not be opened.
#[derive(Debug)]
pub enum OpenError {
    /// Another process, or another store of this one, holds the folder.
    Held {
        folder: PathBuf,
        process: Option<u32>,
    },
    /// There is no store, and none is made for somebody who only wants to read.
    Missing {
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
}

impl OpenError {
    pub(crate) fn broken(folder: &Path, error: Broken) -> OpenError {
        let folder = folder.to_owned();
        match error {
            Broken::Io(error) => OpenError::Io { folder, error },
            Broken::Damaged(what) => OpenError::Corrupt { folder, what },
            error @ Broken::Undecodable(_) => OpenError::Corrupt { folder, what: error.to_string() },
        }
    }
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::Held { folder, process } => {
                let by = process.map_or_else(|| "another process".into(), |id| format!("process {id}"));
                write!(
                    f,
                    "{} is in use by {by}: a store's folder is served by one process at a time; \
                     stop the other one, or give this one another folder",
                    folder.display()
                )
            }
            OpenError::Missing { folder } => write!(f, "there is no store in {}", folder.display()),
            OpenError::Foreign { folder, found } => write!(
                f,
                "{} is not a store, and it is not empty ({found} is in it): give an empty or new folder",
                folder.display()
            ),
            OpenError::Format { folder, found } => {
                let number = found.strip_prefix(PREFIX).and_then(|n| n.parse::<u32>().ok());
                let todo = match number {
                    Some(number) if number < FORMAT => {
                        "it was written by an earlier version and cannot be taken over: let that version run its jobs \
                         to their end, and give this one a new folder"
                    }
                    Some(_) => "open it with the version that wrote it, or a newer one",
                    None => "if it is a store at all, restore it from a backup; or give a new folder",
                };
                let own = format!("{PREFIX}{FORMAT}");
                write!(
                    f,
                    "{} is in the format {found:?}, and this version reads only {own:?}: {todo}",
                    folder.display()
                )
            }
            OpenError::Corrupt { folder, what } => {
                write!(f, "{} is damaged: {what}; restore it from a backup", folder.display())
            }
            OpenError::Io { folder, error } => write!(f, "{} cannot be used: {error}", folder.display()),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OpenError::Io { error, .. } => Some(error),
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
    /// Only to be read: nothing is made.
    pub(crate) fn hold(path: &Path, read_only: bool) -> Result<Folder, OpenError> {
        let io = |error| OpenError::Io { folder: path.to_owned(), error };
        if !read_only {
            create(path).map_err(io)?;
        }
        // Looked at before anything is put there.
        let found = marker(path).map_err(io)?;
        if found.is_none() && read_only {
            return Err(OpenError::Missing { folder: path.to_owned() });
        }
        if found.is_none()
            && let Some(found) = foreign(path).map_err(io)?
        {
            return Err(OpenError::Foreign { folder: path.to_owned(), found });
        }
        let mut lock =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path.join(LOCK)).map_err(io)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // It helps whoever reads the message; without it they look for themselves.
                let _ = lock.read_to_string(&mut holder);
                return Err(OpenError::Held { folder: path.to_owned(), process: holder.trim().parse().ok() });
            }
            other => other.map_err(|error| io(error.into()))?,
        }
        // A full disk is no reason not to open: then the message names nobody.
        let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
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

    pub(crate) fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }

    pub(crate) fn tree(&self, place: Place) -> PathBuf {
        self.path.join(match place {
            Place::Records => "records",
            Place::Bytes => "bytes",
            Place::Small => "small",
        })
    }

    /// Makes folders that are not there.
    pub(crate) fn make(&self, names: &[&str]) -> Result<(), OpenError> {
        let make = || {
            for name in names {
                let path = self.path.join(name);
                if !path.is_dir() {
                    std::fs::create_dir(&path)?;
                }
            }
            Ok(())
        };
        make().map_err(|error| OpenError::Io { folder: self.path.clone(), error })
    }

    /// Makes certain that what is in folders now is found there after a power cut: whoever put it there
    /// may have failed to, and opening a tree removes what has been replaced.
    pub(crate) fn settle(&self, names: &[&str]) -> Result<(), OpenError> {
        let mut paths = names.iter().map(|name| self.path.join(name)).chain([self.path.clone()]);
        paths.try_for_each(|path| sync(&path)).map_err(|error| OpenError::Io { folder: self.path.clone(), error })
    }

    /// Whether the disk takes what is written: a file is written, synced and removed.
    pub(crate) fn probe(&self) -> std::io::Result<()> {
        let path = self.path.join(PROBE);
        let probe = || {
            let mut file = File::create(&path)?;
            for n in 0..PROBE_BYTES / 4_096 {
                // Not zeros, which some file systems do not write.
                file.write_all(&[n as u8 | 1; 4_096])?;
            }
            file.sync_all()?;
            sync(&self.path)
        };
        let result = probe();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => result.and(Err(error)),
            _ => result.and_then(|()| sync(&self.path)),
        }
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
