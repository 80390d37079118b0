//! The journal: every group of changes, in order, before anything else knows of it.
//!
//! A journal is a row of segments, files of their own. A segment begins with a header; frames follow,
//! a group each, at multiples of [`ALIGN`]. Numbers are little-endian.
//!
//! | header | bytes | frame | bytes |
//! | --- | --- | --- | --- |
//! | `LHJOURN1` | 8 | mark: that of the header | 8 |
//! | number of the segment | 8 | number of the group, without gaps | 8 |
//! | first group | 8 | sequence number in the tables | 8 |
//! | sequence number, above all before | 8 | flushed: groups up to here are in tables | 8 |
//! | flushed | 8 | length of the body | 8 |
//! | mark, random | 8 | xxh3-128 of the 40 bytes before and the body | 16 |
//! | xxh3-128 of the 48 bytes before | 16 | body: items, see [`Batch`] | |
//!
//! **A segment is only ever appended to by the process that made it, and never after a failure.**
//! What an earlier process wrote may be in the system's memory and not on the disk, also when a later
//! sync says that all is well. So what is recovered is first written into a fresh segment ([`rewrite`]),
//! and only then into tables: a group that is in the tables of one tree must be in the journal for the
//! others.
//!
//! **A torn end is told from damage by what follows it.** Each group is synced before the next is
//! written, whatever it holds, so that at most the last one can be torn. An unreadable frame with a
//! later one behind it was acknowledged.

mod recover;

use std::fs::{File, OpenOptions};
use std::io::{Error, Result};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::{Buf, BufMut, Bytes};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64, xxh3_128};

use crate::format::{get_len, put_len};

pub(crate) use recover::{Group, Unusable, recover};

const MAGIC: &[u8; 8] = b"LHJOURN1";
/// Frames begin at multiples of this.
const ALIGN: usize = 16;
/// The first frame: what a torn header can reach ends before it.
const START: usize = 4_096;
const HEADER: usize = 64;
const FRAME: usize = 56;
/// Bytes of a frame that its check covers besides the body.
const CHECKED: usize = 40;
/// Ends the name of a segment that is being rewritten.
const UNFINISHED: &str = ".new";

/// Which tree an item belongs to. The numbers are on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Records = 0,
    Bytes = 1,
    Small = 2,
}

pub(crate) const PLACES: [Place; 3] = [Place::Records, Place::Bytes, Place::Small];

/// A group's changes. In a frame: place (and 128 for a removal), length of the key, key, and for what
/// is put length of the value, value; lengths in seven bits a byte.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    items: Vec<(Place, Bytes, Option<Bytes>)>,
    bytes: usize,
}

impl Batch {
    pub(crate) fn insert(&mut self, place: Place, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.push(place, key.into(), Some(value.into()));
    }

    pub(crate) fn remove(&mut self, place: Place, key: impl Into<Bytes>) {
        self.push(place, key.into(), None);
    }

    fn push(&mut self, place: Place, key: Bytes, value: Option<Bytes>) {
        self.bytes += 12 + key.len() + value.as_ref().map_or(0, Bytes::len);
        self.items.push((place, key, value));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn into_items(self) -> impl Iterator<Item = (Place, Bytes, Option<Bytes>)> {
        self.items.into_iter()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(self.bytes);
        for (place, key, value) in &self.items {
            out.push(*place as u8 | if value.is_none() { 128 } else { 0 });
            put_len(out, key.len());
            out.extend_from_slice(key);
            if let Some(value) = value {
                put_len(out, value.len());
                out.extend_from_slice(value);
            }
        }
    }

    fn decode(body: &Bytes) -> Option<Batch> {
        let mut batch = Batch::default();
        let mut rest = &body[..];
        let slice = |rest: &mut &[u8]| {
            let len = get_len(rest)?;
            let from = body.len() - rest.len();
            (len <= rest.len()).then(|| {
                rest.advance(len);
                body.slice(from..from + len)
            })
        };
        while let Some((&kind, more)) = rest.split_first() {
            rest = more;
            let place = PLACES.into_iter().find(|p| *p as u8 == kind & 127)?;
            // A table would not take an empty one.
            let key = slice(&mut rest).filter(|key| !key.is_empty())?;
            let value = if kind & 128 == 0 { Some(slice(&mut rest)?) } else { None };
            batch.push(place, key, value);
        }
        Some(batch)
    }
}

/// The segment that is written to.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    number: u64,
    mark: u64,
    next_group: u64,
    at: usize,
    /// The file's length, and by how much it grows.
    room: u64,
    step: u64,
    buffer: Vec<u8>,
    /// A write or a sync failed: nothing that follows could be trusted.
    failed: bool,
}

impl Journal {
    /// Makes a segment, durable itself. Its file grows by `step` bytes at a time, so that few syncs
    /// have to write a new length, and takes as much of the disk as is written.
    pub(crate) fn create(folder: &Path, number: u64, group: u64, seqno: u64, flushed: u64, step: u64) -> Result<Self> {
        let journal = Self::make(&segment(folder, number), number, group, seqno, flushed, step)?;
        journal.file.sync_all()?;
        File::open(folder)?.sync_all()?;
        Ok(journal)
    }

    fn make(path: &Path, number: u64, group: u64, seqno: u64, flushed: u64, step: u64) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        let step = step.max(START as u64);
        file.set_len(step)?;
        let nanos =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let mark = xxh3_64(&[nanos, number, std::process::id().into()].map(u64::to_le_bytes).concat()) | 1;
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        [number, group, seqno, flushed, mark].into_iter().for_each(|n| header.put_u64_le(n));
        let check = xxh3_128(&header);
        header.put_u128_le(check);
        file.write_all_at(&header, 0)?;
        Ok(Journal {
            file,
            number,
            mark,
            next_group: group,
            at: START,
            room: step,
            step,
            buffer: Vec::new(),
            failed: false,
        })
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn next_group(&self) -> u64 {
        self.next_group
    }

    /// Bytes from the beginning of the file.
    pub(crate) fn len(&self) -> u64 {
        self.at as u64
    }

    /// Writes a group and makes it durable. A failure is never tried again: the system may have thrown
    /// away what it could not write, and say at the next sync that all is well.
    pub(crate) fn append(&mut self, batch: &Batch, seqno: u64, flushed: u64) -> Result<()> {
        if self.failed {
            return Err(Error::other("the journal has failed before"));
        }
        let done = self.write_group(seqno, flushed, |out| batch.encode(out)).and_then(|()| self.file.sync_data());
        self.failed = done.is_err();
        done
    }

    fn write_group(&mut self, seqno: u64, flushed: u64, encode: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.buffer.clear();
        self.buffer.resize(FRAME, 0);
        encode(&mut self.buffer);
        let len = self.buffer.len() - FRAME;
        let mut head = &mut self.buffer[..];
        [self.mark, self.next_group, seqno, flushed, len as u64].into_iter().for_each(|n| head.put_u64_le(n));
        let check = check(&self.buffer[..CHECKED], &self.buffer[FRAME..]);
        self.buffer[CHECKED..FRAME].copy_from_slice(&check.to_le_bytes());
        self.buffer.resize(self.buffer.len().next_multiple_of(ALIGN), 0);
        self.write()?;
        self.at += self.buffer.len();
        self.next_group += 1;
        if self.buffer.capacity() > 4 * 1024 * 1024 {
            self.buffer = Vec::new();
        }
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let end = (self.at + self.buffer.len()) as u64;
        if end > self.room {
            let room = end.next_multiple_of(self.step);
            self.file.set_len(room)?;
            self.room = room;
        }
        self.file.write_all_at(&self.buffer, self.at as u64)
    }
}

fn check(head: &[u8], body: &[u8]) -> u128 {
    let mut hash = Xxh3Default::new();
    hash.update(head);
    hash.update(body);
    hash.digest128()
}

fn segment(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:016x}"))
}

/// Writes recovered groups into a segment of their own, which takes the place of those before it: as a
/// whole, or not at all.
pub(crate) fn rewrite(folder: &Path, number: u64, groups: &[Group], flushed: u64, step: u64) -> Result<()> {
    let Some(first) = groups.first() else { return Ok(()) };
    let path = segment(folder, number);
    let unfinished = path.with_extension(&UNFINISHED[1..]);
    // One that was left by a crash says nothing.
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut journal = Journal::make(&unfinished, number, first.number, first.seqno, flushed, step)?;
    for group in groups {
        journal.write_group(group.seqno, flushed, |out| out.extend_from_slice(&group.body))?;
    }
    journal.file.sync_all()?;
    std::fs::rename(&unfinished, &path)?;
    File::open(folder)?.sync_all()
}

/// Removes segments whose groups are in tables.
pub(crate) fn remove(folder: &Path, numbers: impl IntoIterator<Item = u64>) -> Result<()> {
    let mut any = false;
    for number in numbers {
        match std::fs::remove_file(segment(folder, number)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => any = true,
        }
    }
    if any { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// What a segment takes on disk.
pub(crate) fn bytes(folder: &Path, number: u64) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(segment(folder, number)).ok().map(|m| 512 * m.blocks())
}
