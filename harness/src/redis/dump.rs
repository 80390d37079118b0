//! Every key of a namespace, as it is in the Redis.

use std::collections::BTreeMap;
use std::io::{Error, Result};

use super::resp::{Connection, Value};

const PREFIX: &str = "{lh:0}";

/// A record. Clocks in microseconds.
#[derive(Clone, Debug)]
pub struct Record {
    pub expiry: Option<u64>,
    pub version: u64,
    pub bytes: Vec<u8>,
    /// The Redis's own, in milliseconds; -1 for none.
    pub ttl: i64,
}

#[derive(Debug, Default)]
pub struct Dump {
    pub now: u64,
    pub keys: u64,
    /// Those that have not expired.
    pub records: BTreeMap<String, Record>,
    pub expired: u64,
    pub indexes: BTreeMap<String, BTreeMap<String, u64>>,
    /// Where each member stands.
    pub places: BTreeMap<String, BTreeMap<String, u64>>,
    pub broken: Vec<String>,
}

fn command(parts: &[&[u8]]) -> Vec<Vec<u8>> {
    parts.iter().map(|p| p.to_vec()).collect()
}

/// Reads all of it.
///
/// # Errors
/// If the Redis does not answer.
pub fn dump(redis: &mut Connection) -> Result<Dump> {
    let mut dump = Dump::default();
    let time = redis.ask(&["TIME"])?;
    let [seconds, micros] = time.list() else { return Err(Error::other("no time")) };
    dump.now = seconds.number().cast_unsigned() * 1_000_000 + micros.number().cast_unsigned();
    let keys = keys(redis)?;
    dump.keys = keys.len() as u64;
    let types = redis.ask_all(&keys.iter().map(|k| command(&[b"TYPE", k])).collect::<Vec<_>>())?;
    let (mut records, mut indexes) = (Vec::new(), Vec::new());
    for (key, kind) in keys.iter().zip(types) {
        let text = String::from_utf8_lossy(key).into_owned();
        let name = text.strip_prefix(PREFIX).unwrap_or_default().to_owned();
        match (&*kind.text(), name.split_once(':'), &*name) {
            ("string", Some(("r", name)), _) => records.push((key, name.to_owned())),
            ("zset", Some(("i", name)), _) => indexes.push((key, name.to_owned())),
            ("stream", Some(("l", "audit/default")), _) | ("hash", None, "meta") => {}
            // Its time has come since the keys were listed.
            ("none", ..) => {}
            (kind, ..) => dump.broken.push(format!("the key `{text}` of type {kind} is nobody's")),
        }
    }
    let asked: Vec<_> = records.iter().flat_map(|(k, _)| [command(&[b"GET", k]), command(&[b"PTTL", k])]).collect();
    for ((_, name), answers) in records.into_iter().zip(redis.ask_all(&asked)?.chunks(2)) {
        dump.record(name, answers);
    }
    let asked: Vec<_> = indexes.iter().map(|(k, _)| command(&[b"ZRANGE", k, b"0", b"-1", b"WITHSCORES"])).collect();
    for ((_, name), answer) in indexes.into_iter().zip(redis.ask_all(&asked)?) {
        for pair in answer.list().chunks(2) {
            let [member, score] = pair else { continue };
            let (member, score) = (member.text(), score.text().parse::<f64>().unwrap_or(-1.0) as u64);
            dump.places.entry(member.clone()).or_default().insert(name.clone(), score);
            dump.indexes.entry(name.clone()).or_default().insert(member, score);
        }
    }
    Ok(dump)
}

fn keys(redis: &mut Connection) -> Result<Vec<Vec<u8>>> {
    let mut keys = Vec::new();
    let mut cursor = "0".to_owned();
    loop {
        let page = redis.ask(&["SCAN", &cursor, "COUNT", "1000"])?;
        let [next, found] = page.list() else { return Err(Error::other("no page")) };
        keys.extend(found.list().iter().map(|k| k.bytes().to_vec()));
        cursor = next.text();
        if cursor == "0" {
            break;
        }
    }
    keys.sort_unstable();
    keys.dedup();
    Ok(keys)
}

impl Dump {
    fn record(&mut self, name: String, answers: &[Value]) {
        let [value, ttl] = answers else { return };
        // It went meanwhile, by its time.
        let (Value::Bytes(value), ttl) = (value, ttl.number()) else { return };
        let number = |at: usize| value.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes);
        let (Some(_), Some(expiry), Some(version)) = (number(0), number(8), number(16)) else {
            self.broken.push(format!("the record {name} has no head"));
            return;
        };
        let expiry = (expiry != u64::MAX).then_some(expiry);
        if expiry.is_some_and(|e| e <= self.now) {
            self.expired += 1;
            return;
        }
        let bytes = value.get(24..).unwrap_or_default().to_vec();
        self.records.insert(name, Record { expiry, version, bytes, ttl });
    }

    pub fn size(&self, index: &str) -> u64 {
        self.indexes.get(index).map_or(0, |members| members.len() as u64)
    }

    /// Where a member stands.
    pub fn stands(&self, member: &str) -> BTreeMap<String, u64> {
        self.places.get(member).cloned().unwrap_or_default()
    }
}
