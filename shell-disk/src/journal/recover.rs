//! Reading a journal: which groups it has, and whether what cannot be read was acknowledged.

use std::io::Error;
use std::path::Path;

use bytes::{Buf, Bytes};
use xxhash_rust::xxh3::xxh3_128;

use super::{ALIGN, Batch, CHECKED, FRAME, HEADER, MAGIC, START, UNFINISHED, check, segment};

/// What a journal says when it is read.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    /// The segments that are there, by number.
    pub segments: Vec<u64>,
    /// The number that the next group gets.
    pub next_group: u64,
    /// A sequence number above all that were given.
    pub seqno: u64,
    /// The same for groups that were acknowledged; `None`: a header that may know better is blank.
    pub acknowledged: Option<u64>,
    /// Groups up to here are in tables.
    pub flushed: u64,
    /// Groups that are not in tables yet, in order.
    pub groups: Vec<Group>,
    /// Bytes of a last group that was not written to its end, and so was not acknowledged.
    pub torn: u64,
}

/// A group as it was written.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(super) number: u64,
    pub seqno: u64,
    pub(super) body: Bytes,
}

impl Group {
    /// `None`: it has items that this format does not know.
    pub(crate) fn batch(&self) -> Option<Batch> {
        Batch::decode(&self.body)
    }
}

/// Why a journal cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    Io(Error),
    /// Groups that were acknowledged cannot be read.
    Damaged(String),
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Self {
        Unusable::Io(error)
    }
}

struct Segment {
    number: u64,
    bytes: Bytes,
    first: u64,
    seqno: u64,
    flushed: u64,
    mark: u64,
}

/// A frame that is what was written.
struct Frame {
    group: u64,
    seqno: u64,
    flushed: u64,
    body: Bytes,
    end: usize,
}

impl Segment {
    /// `None`: the segment was never made to its end.
    fn read(folder: &Path, number: u64) -> std::result::Result<Option<Segment>, Unusable> {
        let bytes = Bytes::from(std::fs::read(segment(folder, number))?);
        let parsed = bytes.get(..HEADER).and_then(|header| {
            let (fields, mut sum) = header.split_at(HEADER - 16);
            let mut rest = fields.strip_prefix(MAGIC)?;
            (sum.get_u128_le() == xxh3_128(fields)).then(|| [(); 5].map(|()| rest.get_u64_le()))
        });
        match parsed {
            Some([own, first, seqno, flushed, mark]) if own == number => {
                Ok(Some(Segment { number, bytes, first, seqno, flushed, mark }))
            }
            // The header is durable before the first group is written.
            None if bytes.iter().skip(START).all(|b| *b == 0) => Ok(None),
            _ => Err(Unusable::Damaged(format!("the header of journal {number:016x} is not what was written"))),
        }
    }

    fn frame(&self, at: usize) -> Option<Frame> {
        let head = self.bytes.get(at..at + FRAME)?;
        let (mut fields, mut sum) = head.split_at(CHECKED);
        let [mark, group, seqno, flushed, len] = [(); 5].map(|()| fields.get_u64_le());
        if mark != self.mark {
            return None;
        }
        let from = at + FRAME;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        let body = self.bytes.get(from..to)?;
        (sum.get_u128_le() == check(&head[..CHECKED], body)).then(|| Frame {
            group,
            seqno,
            flushed,
            body: self.bytes.slice(from..to),
            end: to.next_multiple_of(ALIGN),
        })
    }

    /// The first frame at or behind a place, and where it is.
    fn next(&self, from: usize) -> Option<(usize, Frame)> {
        let mark = self.mark.to_le_bytes();
        (from..self.bytes.len())
            .step_by(ALIGN)
            .filter(|at| self.bytes.get(*at..at + 8).is_some_and(|b| b == mark))
            .find_map(|at| Some((at, self.frame(at)?)))
    }

    /// The frames with their places, and where what is not zero ends.
    fn frames(&self) -> (Vec<(usize, Frame)>, usize) {
        let mut frames = Vec::new();
        let mut at = START;
        while let Some((found, frame)) = self.next(at) {
            at = frame.end;
            frames.push((found, frame));
        }
        (frames, self.bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1))
    }
}

/// A segment with its frames, of which those of groups from `limit` on do not count.
struct Part {
    segment: Segment,
    frames: Vec<(usize, Frame)>,
    /// Where what is not zero ends.
    written: usize,
    limit: u64,
}

impl Part {
    fn counting(&self) -> impl Iterator<Item = &(usize, Frame)> {
        self.frames.iter().filter(|(_, frame)| frame.group < self.limit)
    }

    fn place(&self, byte: usize) -> String {
        format!("in journal {:016x} from byte {byte} on", self.segment.number)
    }
}

/// Numbers of the segments in a folder, in order.
fn numbers(folder: &Path) -> std::result::Result<Vec<u64>, Unusable> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(|n| n.ends_with(UNFINISHED)) {
            continue;
        }
        let number = name.to_str().and_then(|n| u64::from_str_radix(n, 16).ok());
        numbers.push(number.ok_or_else(|| Unusable::Damaged(format!("{name:?} is no journal")))?);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Reads the journal in a folder.
pub(crate) fn recover(folder: &Path) -> std::result::Result<Recovered, Unusable> {
    let mut found = Recovered { segments: numbers(folder)?, ..Recovered::default() };
    let mut parts = Vec::new();
    for number in &found.segments {
        if let Some(segment) = Segment::read(folder, *number)? {
            let (frames, written) = segment.frames();
            parts.push(Part { segment, frames, written, limit: u64::MAX });
        }
    }
    let blank = parts.len() < found.segments.len();
    for part in &parts {
        // Whoever says it last knows best: it was written when it was so.
        let told = part.frames.iter().map(|(_, f)| (f.flushed, f.seqno + 1));
        for (flushed, seqno) in told.chain([(part.segment.flushed, part.segment.seqno)]) {
            found.flushed = found.flushed.max(flushed);
            found.seqno = found.seqno.max(seqno);
        }
    }
    // A segment goes on from where its maker saw those before it end: what they have beyond is not so.
    let mut limit = u64::MAX;
    for part in parts.iter_mut().rev() {
        part.limit = limit;
        limit = limit.min(part.segment.first);
    }
    parts.retain(|part| part.segment.first < part.limit);
    let seqno = |part: &Part| part.counting().last().map_or(0, |(_, f)| f.seqno + 1).max(part.segment.seqno);
    found.acknowledged = parts.iter().map(seqno).max().filter(|_| !blank);
    // What was before the first is in tables.
    found.next_group = limit.min(found.flushed + 1);
    for part in &parts {
        found.take(part)?;
    }
    found.next_group = found.next_group.max(found.flushed + 1);
    Ok(found)
}

impl Recovered {
    fn take(&mut self, part: &Part) -> std::result::Result<(), Unusable> {
        if part.segment.first > self.next_group {
            self.miss(part.segment.first, || format!("before journal {:016x}", part.segment.number))?;
        }
        let mut end = START;
        for (at, frame) in part.counting() {
            if frame.group < self.next_group {
                let place = part.place(*at);
                return Err(Unusable::Damaged(format!("group {} is there twice {place}", frame.group)));
            }
            if frame.group > self.next_group {
                self.miss(frame.group, || part.place(end))?;
            }
            if frame.group > self.flushed {
                self.groups.push(Group { number: frame.group, seqno: frame.seqno, body: frame.body.clone() });
            }
            self.next_group = frame.group + 1;
            end = frame.end;
        }
        // Only the last segment can end in the middle of a group: the others were synced as a whole.
        self.torn = if part.limit == u64::MAX { part.written.saturating_sub(end) as u64 } else { 0 };
        Ok(())
    }

    /// The groups before one are not there. Those that are in tables need not be: their segment was removed,
    /// or a sync failed and they were made durable by the tables alone.
    fn miss(&mut self, until: u64, place: impl Fn() -> String) -> std::result::Result<(), Unusable> {
        let last = until - 1;
        if last > self.flushed {
            let from = self.next_group.max(self.flushed + 1);
            return Err(Unusable::Damaged(format!("groups {from} to {last} cannot be read {}", place())));
        }
        self.next_group = until;
        Ok(())
    }
}
