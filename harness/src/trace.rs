//! What was done to a disk, in order, and which disks a power cut can leave.
//!
//! The rules are those that POSIX leaves open, not those of a kind file system. What was written and
//! not synced is kept or lost sector by sector. A new, renamed or removed name is certain only after
//! its folder was synced; until then some names are kept and some are not. A sync that failed has
//! thrown away what it likes of what it should have written, and a later one does not bring it back.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::rng::Rng;

/// A disk writes a sector or does not.
pub const SECTOR: usize = 512;

/// Number of a file or folder; 0 is the root.
pub type File = u32;

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Op {
    Make { dir: File, name: Vec<u8>, file: File, folder: bool },
    Write { file: File, at: u64, data: Vec<u8> },
    Resize { file: File, len: u64 },
    Sync { file: File, ok: bool },
    Rename { from: (File, Vec<u8>), to: (File, Vec<u8>) },
    Remove { dir: File, name: Vec<u8> },
    Note(Note),
}

/// What is promised from here on, by number of a state (see `workload`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Note {
    /// Either of the two: a group is under way.
    Between(u32, u32),
    Certain(u32),
}

type Names = BTreeMap<(File, Vec<u8>), (File, bool)>;

#[derive(Clone, Debug)]
enum Change {
    Write { at: usize, data: Vec<u8> },
    Resize(usize),
}

#[derive(Clone, Debug, Default)]
struct Content {
    durable: Vec<u8>,
    /// Written and not synced, oldest first.
    pending: Vec<Change>,
}

/// A disk while it is written to: what it has for certain, and what may still reach it.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    files: HashMap<File, Content>,
    names: Names,
    pending: Vec<Op>,
    /// What is promised at this point.
    pub promise: Option<Note>,
}

fn put(content: &mut Vec<u8>, at: usize, data: &[u8]) {
    let end = at + data.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[at..end].copy_from_slice(data);
}

/// The parts of a write that lie in one sector each.
fn sectors(at: usize, data: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let first = (SECTOR - at % SECTOR).min(data.len());
    let (head, tail) = data.split_at(first);
    std::iter::once((at, head))
        .chain(tail.chunks(SECTOR).enumerate().map(move |(n, part)| (at + first + n * SECTOR, part)))
        .filter(|(_, part)| !part.is_empty())
}

/// Does what an operation says to names. What cannot be done is not.
fn rename(names: &mut Names, op: &Op) {
    match op {
        Op::Make { dir, name, file, folder } => {
            names.insert((*dir, name.clone()), (*file, *folder));
        }
        Op::Rename { from, to } => {
            if let Some(file) = names.remove(from) {
                names.insert(to.clone(), file);
            }
        }
        Op::Remove { dir, name } => {
            names.remove(&(*dir, name.clone()));
        }
        Op::Write { .. } | Op::Resize { .. } | Op::Sync { .. } | Op::Note(_) => {}
    }
}

fn dir_of(op: &Op) -> Option<File> {
    match op {
        Op::Make { dir, .. } | Op::Remove { dir, .. } => Some(*dir),
        Op::Rename { to, .. } => Some(to.0),
        Op::Write { .. } | Op::Resize { .. } | Op::Sync { .. } | Op::Note(_) => None,
    }
}

impl Disk {
    /// Does what an operation says; `losses` decides what a failed sync throws away.
    pub fn apply(&mut self, op: &Op, losses: &mut Rng) {
        match op {
            Op::Write { file, at, data } => {
                let write = Change::Write { at: *at as usize, data: data.clone() };
                self.files.entry(*file).or_default().pending.push(write);
            }
            Op::Resize { file, len } => {
                self.files.entry(*file).or_default().pending.push(Change::Resize(*len as usize));
            }
            Op::Sync { file, ok } => self.sync(*file, *ok, losses),
            Op::Make { .. } | Op::Rename { .. } | Op::Remove { .. } => self.pending.push(op.clone()),
            Op::Note(note) => self.promise = Some(*note),
        }
    }

    fn sync(&mut self, file: File, ok: bool, losses: &mut Rng) {
        let content = self.files.entry(file).or_default();
        if !ok {
            // The system took the data for written, or the disk failed to: nobody will write it again.
            let lost = std::mem::take(&mut content.pending);
            for change in lost {
                match change {
                    Change::Write { at, data } => {
                        let kept = sectors(at, &data).filter(|_| losses.chance(500));
                        content.pending.extend(kept.map(|(at, d)| Change::Write { at, data: d.to_vec() }));
                    }
                    resize => content.pending.push(resize),
                }
            }
            return;
        }
        for change in content.pending.drain(..) {
            match change {
                Change::Write { at, data } => put(&mut content.durable, at, &data),
                Change::Resize(len) => content.durable.resize(len, 0),
            }
        }
        let names = &mut self.names;
        self.pending.retain(|op| {
            let its = dir_of(op) == Some(file);
            if its {
                rename(names, op);
            }
            !its
        });
    }

    /// Writes into an empty folder one of the disks that a power cut at this point can leave.
    pub fn cut(&self, rng: &mut Rng, out: &Path) -> std::io::Result<()> {
        let names = self.cut_names(rng);
        let keep = [0, 125, 500, 875, 1_000][rng.below(5) as usize];
        self.write(&names, out, |file| self.cut_content(file, keep, rng))
    }

    /// Writes out the disk as the system shows it: with all that was written.
    pub fn all(&self, out: &Path) -> std::io::Result<()> {
        let mut names = self.names.clone();
        self.pending.iter().for_each(|op| rename(&mut names, op));
        self.write(&names, out, |file| self.cut_content(file, 1_000, &mut Rng::new(0, 0)))
    }

    fn write(&self, names: &Names, out: &Path, mut content: impl FnMut(File) -> Vec<u8>) -> std::io::Result<()> {
        let mut folders = vec![(0, out.to_owned())];
        while let Some((dir, path)) = folders.pop() {
            for ((_, name), (file, folder)) in names.range((dir, Vec::new())..(dir + 1, Vec::new())) {
                let path: PathBuf = path.join(OsStr::from_bytes(name));
                if *folder {
                    std::fs::create_dir(&path)?;
                    folders.push((*file, path));
                } else {
                    std::fs::write(&path, content(*file))?;
                }
            }
        }
        Ok(())
    }

    fn cut_names(&self, rng: &mut Rng) -> Names {
        let mut names = self.names.clone();
        let n = self.pending.len() as u64;
        match rng.below(8) {
            0 => {}
            1 | 2 => self.pending.iter().for_each(|op| rename(&mut names, op)),
            // As most file systems do: in the order in which it was done.
            3..=5 => {
                let first = rng.below(n + 1) as usize;
                self.pending.iter().take(first).for_each(|op| rename(&mut names, op));
            }
            // In order within each folder.
            6 => {
                let mut ended: HashMap<Option<File>, bool> = HashMap::new();
                for op in &self.pending {
                    let ended = ended.entry(dir_of(op)).or_default();
                    *ended |= rng.chance(200);
                    if !*ended {
                        rename(&mut names, op);
                    }
                }
            }
            _ => self.pending.iter().filter(|_| rng.chance(500)).for_each(|op| rename(&mut names, op)),
        }
        names
    }

    fn cut_content(&self, file: File, keep: u64, rng: &mut Rng) -> Vec<u8> {
        let Some(content) = self.files.get(&file) else { return Vec::new() };
        let mut bytes = content.durable.clone();
        for change in &content.pending {
            match change {
                Change::Write { at, data } => {
                    for (at, part) in sectors(*at, data).filter(|_| rng.chance(keep)) {
                        put(&mut bytes, at, part);
                    }
                }
                Change::Resize(len) if rng.chance(keep.max(500)) => bytes.resize(*len, 0),
                Change::Resize(_) => {}
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(file: File, at: u64, data: &[u8]) -> Op {
        Op::Write { file, at, data: data.to_vec() }
    }

    fn left(ops: &[Op], seed: u64) -> BTreeMap<String, Vec<u8>> {
        let out = tempfile::tempdir().expect("a folder");
        let mut disk = Disk::default();
        ops.iter().for_each(|op| disk.apply(op, &mut Rng::new(seed, 1)));
        disk.cut(&mut Rng::new(seed, 2), out.path()).expect("written");
        std::fs::read_dir(out.path())
            .expect("listed")
            .map(|e| e.expect("listed"))
            .map(|e| (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).expect("read")))
            .collect()
    }

    #[test]
    fn what_was_synced_is_there_and_the_rest_is_there_by_sectors() {
        let make = Op::Make { dir: 0, name: b"f".to_vec(), file: 1, folder: false };
        let synced = [make, write(1, 0, &[1; 2_000]), Op::Sync { file: 1, ok: true }, Op::Sync { file: 0, ok: true }];
        let more = [&synced[..], &[write(1, 1_000, &[2; 2_000])]].concat();
        let mut kinds = std::collections::BTreeSet::new();
        for seed in 0..200 {
            assert_eq!(left(&synced, seed)["f"], [1; 2_000]);
            let bytes = &left(&more, seed)["f"];
            assert!(bytes[..1_000].iter().all(|b| *b == 1));
            for (n, sector) in bytes.chunks(SECTOR).enumerate().skip(2) {
                assert!(sector.windows(2).all(|w| w[0] == w[1] || n == 3), "a sector is of one write");
            }
            kinds.insert(bytes.clone());
        }
        assert!(kinds.len() > 10, "many disks are possible: {}", kinds.len());
    }

    #[test]
    fn a_name_is_certain_after_its_folder_was_synced() {
        let make = |name: &[u8], file| Op::Make { dir: 0, name: name.to_vec(), file, folder: false };
        let ops = [
            make(b"a", 1),
            Op::Sync { file: 0, ok: true },
            make(b"b", 2),
            Op::Rename { from: (0, b"b".to_vec()), to: (0, b"a".to_vec()) },
            write(2, 0, b"new"),
            Op::Sync { file: 2, ok: true },
        ];
        let names: std::collections::BTreeSet<_> = (0..200).map(|seed| left(&ops, seed)).collect();
        let of = |pairs: &[(&str, &[u8])]| pairs.iter().map(|(n, b)| ((*n).to_owned(), b.to_vec())).collect();
        let all: [BTreeMap<String, Vec<u8>>; 3] =
            [of(&[("a", b"")]), of(&[("a", b""), ("b", b"new")]), of(&[("a", b"new")])];
        assert_eq!(names, all.into_iter().collect());
    }

    #[test]
    fn what_a_failed_sync_lost_no_later_one_brings_back() {
        let make = Op::Make { dir: 0, name: b"f".to_vec(), file: 1, folder: false };
        let sync = |ok| Op::Sync { file: 1, ok };
        let names = Op::Sync { file: 0, ok: true };
        let ops = [make, names, write(1, 0, &[1; 8 * SECTOR]), sync(false), sync(true)];
        let whole = (0..100).filter(|seed| left(&ops, *seed)["f"] == [1; 8 * SECTOR]).count();
        assert!(whole < 10, "{whole} of 100");
    }
}
