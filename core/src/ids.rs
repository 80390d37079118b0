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

/// A ULID: 48 bits of the store's milliseconds, 8 bits of shard, 72 random bits, written as 26
/// characters of Crockford's base 32. Ids made by one replica strictly increase.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct JobId(u128);

const RANDOM_BITS: u32 = 72;
const RANDOM_MASK: u128 = (1 << RANDOM_BITS) - 1;
const TIME_MS_MAX: u64 = (1 << 48) - 1;

impl JobId {
    fn new(ms: u64, random: u128) -> Self {
        let ms = u128::from(ms.min(TIME_MS_MAX));
        JobId((ms << 80) | (u128::from(SHARD) << RANDOM_BITS) | (random & RANDOM_MASK))
    }

    /// When the id was made, by the maker's view of the store's clock, in milliseconds.
    pub fn ms(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// The id's 26 characters without an allocation.
    pub fn text(self) -> [u8; ulid::ULID_LEN] {
        let mut buf = [0; ulid::ULID_LEN];
        Ulid(self.0).array_to_str(&mut buf);
        buf
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

/// The text is not an id of this shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadId;

impl FromStr for JobId {
    type Err = BadId;

    /// Only the canonical spelling is an id: another spelling would name other keys.
    fn from_str(s: &str) -> Result<Self, BadId> {
        let id = JobId(Ulid::from_string(s).map_err(|_| BadId)?.0);
        if id.text() != s.as_bytes() || ((id.0 >> RANDOM_BITS) as u8) != SHARD {
            return Err(BadId);
        }
        Ok(id)
    }
}

/// Makes the ids, nonces and jitter of one replica from one ChaCha stream.
#[derive(Clone, Debug)]
pub struct Maker {
    rng: rand_chacha::ChaCha8Rng,
    last: JobId,
}

impl Maker {
    pub fn new(seed: [u8; 32]) -> Self {
        use rand_core::SeedableRng as _;
        Maker { rng: rand_chacha::ChaCha8Rng::from_seed(seed), last: JobId(0) }
    }

    /// An id above every earlier one of this maker, also if the clock went back.
    pub fn job_id(&mut self, clock: Clock) -> JobId {
        let random = (u128::from(self.rng.next_u64()) << 64) | u128::from(self.rng.next_u64());
        let fresh = JobId::new(clock / 1_000, random);
        let id = if fresh.ms() > self.last.ms() {
            fresh
        } else if self.last.0 & RANDOM_MASK == RANDOM_MASK {
            JobId::new(self.last.ms() + 1, random)
        } else {
            JobId(self.last.0 + 1)
        };
        self.last = id;
        id
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
