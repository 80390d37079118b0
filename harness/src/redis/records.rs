//! What is stored, written down a second time: the audit reads records by these definitions and not by
//! the core's, so that a mistake there is not made here too.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub const STATUSES: [&str; 9] =
    ["scheduled", "held", "queued", "running", "retrying", "succeeded", "dead", "cancelled", "expired"];
pub const CLASSES: [&str; 3] = ["interactive", "system", "batch"];
/// The outcomes of a child; the first four are statuses.
pub const OUTCOMES: [&str; 5] = ["succeeded", "dead", "cancelled", "expired", "lost"];
const FORMAT: u8 = 1;

// Every field stands for bytes that have to be passed over.
#[allow(dead_code, reason = "the encoding has no names: all fields up to the last that is wanted")]
#[derive(Debug, Deserialize, Serialize)]
pub struct Policy {
    pub max_attempts: u32,
    pub max_deliveries: u32,
    pub max_age_ms: Option<u64>,
    pub lease_ms: Option<u64>,
    pub run_timeout_ms: Option<u64>,
    pub progress_timeout_ms: Option<u64>,
    pub queue_ttl_ms: Option<u64>,
    pub retention_ms: u64,
    pub key_ttl_ms: Option<u64>,
    pub backoff: (u64, u64, u32, u32),
    pub on_prem: bool,
    pub cost: u32,
}

#[allow(dead_code, reason = "the encoding has no names: all fields up to the last that is wanted")]
#[derive(Debug, Deserialize, Serialize)]
pub struct Attempt {
    pub delivery: u32,
    pub token: (u64, u64),
    pub worker: String,
    pub ended: u64,
    pub outcome: u32,
    pub error: Option<(String, Option<String>, Option<String>)>,
    pub run_at: Option<u64>,
}

#[allow(dead_code, reason = "the encoding has no names: all fields up to the last that is wanted")]
#[derive(Debug, Deserialize, Serialize)]
pub struct End {
    pub status: u32,
    pub at: u64,
    pub reason: Option<String>,
    pub result_len: Option<u64>,
    pub attempt: Option<Attempt>,
}

#[allow(dead_code, reason = "the encoding has no names: all fields up to the last that is wanted")]
#[derive(Debug, Deserialize, Serialize)]
pub struct Job {
    pub tenant: String,
    pub queue: String,
    pub class: u32,
    pub policy: Policy,
    pub key: Option<(String, u64)>,
    pub born: u64,
    pub submitted: u64,
    pub due: u64,
    pub attempts: u32,
    pub deliveries: u32,
    pub lives: u32,
    pub end: Option<End>,
    pub deleted: bool,
}

#[allow(dead_code, reason = "the encoding has no names: all fields up to the last that is wanted")]
#[derive(Debug, Deserialize, Serialize)]
pub struct Group {
    pub tenant: String,
    pub queue: String,
    pub class: u32,
    /// 0 all children are run, 1 the first dead one stops it.
    pub mode: u32,
    pub max_parallel: Option<u32>,
    pub policy: Policy,
    pub traceparent: Option<String>,
    pub key: Option<(String, u64)>,
    pub created: u64,
    pub open_until: Option<u64>,
    pub filled: u32,
    pub sealed: bool,
    /// 0 cancelled, 1 its time to be sealed was over, 2 a child is dead.
    pub stopped: Option<u32>,
    /// 2 succeeded, 3 partial, 4 failed, 5 cancelled.
    pub end: Option<(u32, u64)>,
}

#[derive(Debug, Deserialize, Serialize)]
pub enum Owner {
    Job(u128),
    Group(u128),
}

/// Decodes a record's bytes: format, fields, check of both.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let (body, check) = bytes.split_last_chunk::<4>().ok_or("it is too short")?;
    if xxhash_rust::xxh3::xxh3_64(body) as u32 != u32::from_le_bytes(*check) {
        return Err("its check is wrong".into());
    }
    match body.split_first() {
        Some((&FORMAT, fields)) => postcard::take_from_bytes(fields).map(|(value, _)| value).map_err(|e| e.to_string()),
        _ => Err("it is of another format".into()),
    }
}

/// An id as it is printed: 26 characters of Crockford's base 32; a child's with its index behind.
pub fn id(number: u128) -> String {
    const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    const GROUP: u128 = 1 << 71;
    let index = (number & 0xff_ffff) as u32;
    let child = number & GROUP != 0 && index > 0;
    let number = if child { number & !0xff_ffff } else { number };
    let digit = |n: u32| char::from(DIGITS[(number >> (5 * n)) as usize & 31]);
    let text: String = (0..26).rev().map(digit).collect();
    if child { format!("{text}-{:07}", index - 1) } else { text }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A record's bytes.
    pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
        let fields = postcard::to_allocvec(value).unwrap_or_default();
        let mut bytes = [&[FORMAT][..], &fields].concat();
        bytes.extend_from_slice(&(xxhash_rust::xxh3::xxh3_64(&bytes) as u32).to_le_bytes());
        bytes
    }

    /// One that ended well.
    pub fn job(key: Option<(String, u64)>) -> Job {
        let policy = Policy {
            max_attempts: 3,
            max_deliveries: 103,
            max_age_ms: None,
            lease_ms: Some(1),
            run_timeout_ms: None,
            progress_timeout_ms: None,
            queue_ttl_ms: None,
            retention_ms: 60_000,
            key_ttl_ms: None,
            backoff: (1, 2, 3, 4),
            on_prem: false,
            cost: 1,
        };
        let end = End { status: 5, at: 7, reason: None, result_len: Some(2), attempt: None };
        Job {
            tenant: "default".into(),
            queue: "q".into(),
            class: 1,
            policy,
            key,
            born: 1,
            submitted: 1,
            due: 1,
            attempts: 1,
            deliveries: 1,
            lives: 0,
            end: Some(end),
            deleted: false,
        }
    }

    #[test]
    fn a_record_is_read_and_a_flipped_bit_told() {
        let mut bytes = encode(&job(None));
        assert!(decode::<Job>(&bytes).is_ok_and(|j| j.queue == "q" && j.end.is_some()));
        bytes[9] ^= 1;
        assert!(decode::<Job>(&bytes).is_err());
    }

    #[test]
    fn ids_are_written_as_they_are_printed() {
        let (job, group) = (0x1a22b70089d0036f11c5b8ab713550c, 0x1a22b70109f00fc5e2830c791000000);
        assert_eq!(id(job), "01M8NQ024X00VF272VHAVH6N8C");
        assert_eq!(id(group), "01M8NQ044Z03Y5WA1GRY8G0000");
        assert_eq!(id(group | 2), "01M8NQ044Z03Y5WA1GRY8G0000-0000001");
    }
}
