//! A recording: the state of a replica, what it was told from then on, and a digest of what it answered. Told to that
//! state again it gives the same outputs, or tells the first step at which they differ.
//!
//! ```text
//! file  = MAGIC frame(Header) frame(Replica) frame(Step)*        a torn end is the end
//! frame = length u32 LE, postcard with its runs of zeros squeezed, xxh3_64 of that as u32 LE
//! ```
//!
//! **No contents are in it**: payloads, results, metadata and progress are replaced by their hash and length, texts
//! of errors by as many letters. Names are in it: of tenants, queues, workers, idempotency keys and pools.
//!
//! Reading order: [`Recorder`] (at the server), [`Player`] (at the simulator), `redact`, `digest`, `state`.

mod digest;
mod redact;
mod state;
mod zeros;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use crate::replica::{Input, Now, Output, Replica, StoreId};
use digest::Side;
use redact::Shape;

/// What every recording begins with.
pub const MAGIC: &[u8; 16] = b"leasehold record";
/// Of the encoding. A recording is replayed by the release that made it.
pub const FORMAT: u32 = 2;

/// Where a recording comes from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Header {
    pub format: u32,
    /// The server's version.
    pub release: String,
    /// Number of its first step in the life of the replica, from 0.
    pub first: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Step {
    now: Now,
    input: Input,
    /// Of each output.
    digests: Vec<u64>,
}

/// Turns a replica's steps into a recording.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// Where contents will be in the answers to calls that are under way.
    asked: BTreeMap<StoreId, Shape>,
    /// Room to work in.
    bytes: Vec<u8>,
}

impl Recorder {
    /// The beginning of a recording, at any step of a replica's life: `first` is the number of the next.
    pub fn begin(release: &str, first: u64, replica: &Replica) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        frame(&mut out, &Header { format: FORMAT, release: release.into(), first }, &mut Vec::new());
        seal(&mut out, &state::of(replica));
        out
    }

    /// Adds a step: what was told, and what came out.
    pub fn step(&mut self, now: Now, mut input: Input, mut outputs: Vec<Output>, out: &mut Vec<u8>) {
        if let Input::StoreReply { id, reply } = &mut input {
            redact::reply(self.asked.remove(id), reply);
        }
        if let Input::Request { request, .. } = &mut input {
            redact::request(request);
        }
        self.overlook(&outputs);
        let digests = outputs.iter_mut().map(|output| digest::of(output, Side::Server, &mut self.bytes)).collect();
        frame(out, &Step { now, input, digests }, &mut self.bytes);
    }

    /// A step that is not recorded: what it asked may be answered in one that is.
    pub fn overlook(&mut self, outputs: &[Output]) {
        let shapes = outputs.iter().filter_map(|output| match output {
            Output::Store { id, op } => Some((*id, redact::shape(op))),
            _ => None,
        });
        self.asked.extend(shapes);
        self.forget();
    }

    /// Knows from here on what another has overlooked.
    pub fn learn(&mut self, from: Recorder) {
        self.asked.extend(from.asked);
        self.forget();
    }

    /// An answer that never comes is dropped with the oldest.
    fn forget(&mut self) {
        while self.asked.len() > ASKED {
            self.asked.pop_first();
        }
    }
}

/// Calls to the store that are remembered: more than a replica ever has under way.
const ASKED: usize = 10_000;

fn frame<T: serde::Serialize>(out: &mut Vec<u8>, value: &T, bytes: &mut Vec<u8>) {
    bytes.clear();
    *bytes = crate::codec::append(value, core::mem::take(bytes));
    seal(out, bytes);
}

fn seal(out: &mut Vec<u8>, bytes: &[u8]) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    zeros::squeeze(bytes, out);
    let squeezed = out.get(start + 4..).unwrap_or_default();
    let (len, check) = (squeezed.len() as u32, xxhash_rust::xxh3::xxh3_64(squeezed) as u32);
    out.iter_mut().skip(start).zip(len.to_le_bytes()).for_each(|(to, from)| *to = from);
    out.extend_from_slice(&check.to_le_bytes());
}

/// Takes the next frame off; `None` at the end, and where the file was torn or damaged.
fn unframe(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let (len, after) = rest.split_first_chunk::<4>()?;
    let (bytes, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let (check, after) = after.split_first_chunk::<4>()?;
    if xxhash_rust::xxh3::xxh3_64(bytes) as u32 != u32::from_le_bytes(*check) {
        return None;
    }
    let bytes = zeros::expand(bytes)?;
    *rest = after;
    Some(bytes)
}

/// Why a file is no recording that can be replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    NotARecording,
    /// It ends before its first step, or is damaged there.
    Torn,
    /// Of another encoding, made by that release if it says so.
    OtherFormat(Option<String>),
}

/// One step played.
#[derive(Clone, Debug)]
pub struct Played {
    /// In the replica's life, from 0.
    pub number: u64,
    pub now: Now,
    pub input: Input,
    pub outputs: Vec<Output>,
    /// Whether each output is what was recorded, and as many came.
    pub same: Result<(), Difference>,
}

/// The first output of a step that is not what was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// From 0.
    pub output: usize,
    /// How many outputs were recorded.
    pub recorded: usize,
}

/// Feeds a recording to a replica.
#[derive(Debug)]
pub struct Player<'a> {
    pub header: Header,
    pub replica: Replica,
    rest: &'a [u8],
    next: u64,
}

impl<'a> Player<'a> {
    pub fn new(recording: &'a [u8]) -> Result<Player<'a>, Unreadable> {
        let Some(mut rest) = recording.strip_prefix(MAGIC) else {
            return Err(if MAGIC.starts_with(recording) { Unreadable::Torn } else { Unreadable::NotARecording });
        };
        let bytes = unframe(&mut rest).ok_or(Unreadable::Torn)?;
        let header: Header = match postcard::from_bytes(&bytes) {
            Ok(header) => header,
            Err(_) => {
                let start = postcard::take_from_bytes::<(u32, String)>(&bytes);
                return Err(Unreadable::OtherFormat(start.ok().map(|((_, release), _)| release)));
            }
        };
        if header.format != FORMAT {
            return Err(Unreadable::OtherFormat(Some(header.release)));
        }
        let bytes = unframe(&mut rest).ok_or(Unreadable::Torn)?;
        // A state of another shape is another release's.
        let Ok((replica, [])) = postcard::take_from_bytes(&bytes) else {
            return Err(Unreadable::OtherFormat(Some(header.release)));
        };
        Ok(Player { next: header.first, header, replica, rest })
    }

    /// Bytes that are left: more than none when all steps have been played if the end is torn.
    pub fn left(&self) -> usize {
        self.rest.len()
    }
}

impl Iterator for Player<'_> {
    type Item = Played;

    fn next(&mut self) -> Option<Played> {
        let mut rest = self.rest;
        let step: Step = postcard::from_bytes(&unframe(&mut rest)?).ok()?;
        self.rest = rest;
        let mut outputs = Vec::new();
        self.replica.step(step.now, step.input.clone(), &mut outputs);
        let mut bytes = Vec::new();
        let mut got = outputs.iter().map(|output| digest::of(&mut output.clone(), Side::Replay, &mut bytes));
        let recorded = step.digests.len();
        let differs = step.digests.iter().position(|digest| got.next() != Some(*digest));
        let more = got.next().map(|_| recorded);
        let same = differs.or(more).map_or(Ok(()), |output| Err(Difference { output, recorded }));
        let number = self.next;
        self.next = self.next.saturating_add(1);
        Some(Played { number, now: step.now, input: step.input, outputs, same })
    }
}
