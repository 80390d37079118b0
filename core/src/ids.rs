//! Job ids and lease tokens.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::str::FromStr;
use rand_core::Rng as _;
use ulid::Ulid;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::store::{Clock, Version};

/// The one shard of this release. Ids carry it and are checked against it.
pub const SHARD: u8 = 0;

/// A ULID: 48 bits of the store's milliseconds, 8 bits of shard, one that tells groups from jobs, 71
/// random bits, written as 26 characters of Crockford's base 32. Ids made by one replica strictly
/// increase. A child of a group is written as the group's id, `-`, and its index in seven digits, so that
/// the order of the text is the order of the children.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct JobId(u128);

/// Names a group. Its last [`CHILD_BITS`] are zero: there its children have their index plus one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct GroupId(u128);

const RANDOM_BITS: u32 = 72;
const KIND: u128 = 1 << 71;
const RANDOM_MASK: u128 = KIND - 1;
const TIME_MS_MAX: u64 = (1 << 48) - 1;
const CHILD_BITS: u32 = 24;
const CHILD_MASK: u128 = (1 << CHILD_BITS) - 1;
/// The largest index that seven digits can write.
const CHILD_MAX: u32 = 9_999_999;

fn at(ms: u64, kind: u128, random: u128) -> u128 {
    let ms = u128::from(ms.min(TIME_MS_MAX));
    (ms << 80) | (u128::from(SHARD) << RANDOM_BITS) | kind | (random & RANDOM_MASK)
}

fn of_this_shard(id: u128) -> bool {
    ((id >> RANDOM_BITS) as u8) == SHARD
}

fn ulid(text: &str) -> Result<u128, BadId> {
    let id = Ulid::from_string(text).map_err(|_| BadId)?.0;
    // Only the canonical spelling is an id: another spelling would name other keys.
    let mut buf = [0; ulid::ULID_LEN];
    let canonical = Ulid(id).array_to_str(&mut buf);
    (canonical == text && of_this_shard(id)).then_some(id).ok_or(BadId)
}

/// An id's text without an allocation.
#[derive(Clone, Copy, Debug)]
pub struct IdText {
    bytes: [u8; ulid::ULID_LEN + 8],
    len: usize,
}

impl core::ops::Deref for IdText {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl IdText {
    fn new(id: u128, index: Option<u32>) -> IdText {
        let mut bytes = [b'-'; ulid::ULID_LEN + 8];
        let mut buf = [0; ulid::ULID_LEN];
        Ulid(id).array_to_str(&mut buf);
        for (to, from) in bytes.iter_mut().zip(buf) {
            *to = from;
        }
        let Some(mut index) = index else { return IdText { bytes, len: ulid::ULID_LEN } };
        for digit in bytes.iter_mut().rev().take(7) {
            *digit = b'0' + (index % 10) as u8;
            index /= 10;
        }
        IdText { bytes, len: bytes.len() }
    }
}

impl JobId {
    /// When the id was made, by the maker's view of the store's clock, in milliseconds.
    pub fn ms(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// The group that the job is a child of, and its index there, from 0.
    pub fn child_of(self) -> Option<(GroupId, u32)> {
        let index = (self.0 & CHILD_MASK) as u32;
        (self.0 & KIND != 0 && index > 0).then(|| (GroupId(self.0 & !CHILD_MASK), index - 1))
    }

    pub fn text(self) -> IdText {
        match self.child_of() {
            Some((group, index)) => IdText::new(group.0, Some(index)),
            None => IdText::new(self.0, None),
        }
    }
}

impl GroupId {
    pub fn text(self) -> IdText {
        IdText::new(self.0, None)
    }

    /// The child with that index, which is below [`limits::CHILDREN_MAX`](crate::limits::CHILDREN_MAX).
    pub fn child(self, index: u32) -> JobId {
        JobId(self.0 | u128::from(index.min(CHILD_MAX) + 1))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(core::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(core::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not an id of this shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadId;

impl FromStr for JobId {
    type Err = BadId;

    fn from_str(s: &str) -> Result<Self, BadId> {
        let Some((group, index)) = s.split_once('-') else {
            let id = ulid(s)?;
            return (id & KIND == 0).then_some(JobId(id)).ok_or(BadId);
        };
        if index.len() != 7 || !index.bytes().all(|b| b.is_ascii_digit()) {
            return Err(BadId);
        }
        let index = index.parse().map_err(|_| BadId)?;
        Ok(group.parse::<GroupId>()?.child(index))
    }
}

impl FromStr for GroupId {
    type Err = BadId;

    fn from_str(s: &str) -> Result<Self, BadId> {
        let id = ulid(s)?;
        (id & KIND != 0 && id & CHILD_MASK == 0).then_some(GroupId(id)).ok_or(BadId)
    }
}

/// Makes the ids, nonces and jitter of one replica from one ChaCha stream.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Maker {
    rng: rand_chacha::ChaCha8Rng,
    last: JobId,
    last_group: GroupId,
}

impl Maker {
    pub fn new(seed: [u8; 32]) -> Self {
        use rand_core::SeedableRng as _;
        Maker { rng: rand_chacha::ChaCha8Rng::from_seed(seed), last: JobId(0), last_group: GroupId(0) }
    }

    /// An id above every earlier one of this maker, also if the clock went back.
    pub fn job_id(&mut self, clock: Clock) -> JobId {
        self.last = JobId(self.next(clock, self.last.0, 0, 1));
        self.last
    }

    /// As [`Maker::job_id`], for a group.
    pub fn group_id(&mut self, clock: Clock) -> GroupId {
        self.last_group = GroupId(self.next(clock, self.last_group.0, KIND, 1 << CHILD_BITS));
        self.last_group
    }

    /// A fresh id of that kind, a multiple of `unit`, above `last`.
    fn next(&mut self, clock: Clock, last: u128, kind: u128, unit: u128) -> u128 {
        let random = (u128::from(self.rng.next_u64()) << 64) | u128::from(self.rng.next_u64());
        let random = random & !(unit - 1);
        let fresh = at(clock / 1_000, kind, random);
        let last_ms = (last >> 80) as u64;
        if clock / 1_000 > last_ms {
            fresh
        } else if (last & RANDOM_MASK) + unit > RANDOM_MASK {
            at(last_ms + 1, kind, random)
        } else {
            last + unit
        }
    }

    /// A fresh nonce, never zero.
    pub fn version(&mut self) -> Version {
        loop {
            let n = self.rng.next_u64();
            if n != 0 {
                return Version(n);
            }
        }
    }

    /// Uniform in `0..=max`, up to a bias of `max` in 2^64.
    pub fn up_to(&mut self, max: u64) -> u64 {
        match max.checked_add(1) {
            Some(n) => ((u128::from(self.rng.next_u64()) * u128::from(n)) >> 64) as u64,
            None => self.rng.next_u64(),
        }
    }
}

/// The fence of one lease: the clock of its grant, the nonce of its claim, and a check that binds
/// both to the job. As text, later grants of a job sort after earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Token {
    pub at: Clock,
    pub nonce: Version,
}

impl Token {
    /// What the worker is given.
    pub fn text(self, job: JobId) -> String {
        format!("{:014x}{:016x}{:08x}", self.at, self.nonce.0, self.check(job))
    }

    /// Reads a token given for this job; `None` if it is not one (mistyped, or of another job).
    pub fn parse(text: &str, job: JobId) -> Option<Token> {
        if text.len() != 38 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let at = u64::from_str_radix(text.get(..14)?, 16).ok()?;
        let nonce = Version(u64::from_str_radix(text.get(14..30)?, 16).ok()?);
        let token = Token { at, nonce };
        (u32::from_str_radix(text.get(30..)?, 16).ok()? == token.check(job)).then_some(token)
    }

    fn check(self, job: JobId) -> u32 {
        let seed = self.nonce.0 ^ self.at.rotate_left(32);
        (xxh3_64_with_seed(&job.0.to_le_bytes(), seed) >> 32) as u32
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token({}, {:?})", self.at, self.nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString as _;

    #[test]
    fn children_are_told_from_jobs_and_sort_by_index() {
        let mut maker = Maker::new([9; 32]);
        for _ in 0..1_000 {
            let (job, group) = (maker.job_id(77_000), maker.group_id(77_000));
            assert_eq!(job.child_of(), None);
            assert_eq!(group.to_string().parse(), Ok(group));
            assert_eq!(group.to_string().parse::<JobId>(), Err(BadId));
            assert_eq!(job.to_string().parse::<GroupId>(), Err(BadId));
            let mut last = None;
            for index in [0, 1, 2, 10, 99, 100_000, CHILD_MAX] {
                let child = group.child(index);
                assert_eq!(child.child_of(), Some((group, index)));
                assert_eq!(child.to_string(), alloc::format!("{group}-{index:07}"));
                assert_eq!(child.to_string().parse(), Ok(child));
                assert!(last < Some(child.to_string()));
                last = Some(child.to_string());
            }
        }
        let group = maker.group_id(1);
        for bad in ["", "-", "-0000001", "x-0000001"] {
            assert_eq!(bad.parse::<JobId>(), Err(BadId));
        }
        for index in ["1", "+000001", "00000001", "000000x", ""] {
            assert_eq!(alloc::format!("{group}-{index}").parse::<JobId>(), Err(BadId), "{index}");
        }
    }

    #[test]
    fn ids_increase_and_read_back() {
        let mut maker = Maker::new([7; 32]);
        let mut last = JobId(0);
        for i in 0..2_000u64 {
            // The clock stands still, goes on, and steps back.
            let id = maker.job_id(1_700_000_000_000_000 + (i % 7) * 1_000);
            assert!(id > last);
            assert_eq!(id.to_string().parse(), Ok(id));
            last = id;
        }
        assert_eq!("".parse::<JobId>(), Err(BadId));
        assert_eq!(last.to_string().to_lowercase().parse::<JobId>(), Err(BadId), "one spelling only");
    }

    #[test]
    fn a_token_is_good_for_its_job_only() {
        let mut maker = Maker::new([1; 32]);
        let (a, b) = (maker.job_id(5), maker.job_id(5));
        let early = Token { at: 99, nonce: Version(u64::MAX) };
        let late = Token { at: 100, nonce: Version(1) };
        assert!(early.text(a) < late.text(a));
        assert_eq!(Token::parse(&early.text(a), a), Some(early));
        assert_eq!(Token::parse(&early.text(a), b), None);
        assert_eq!(Token::parse("", a), None);
        assert_eq!(Token::parse(&"é".repeat(19), a), None);
    }
}
