//! Logs: entries in order, of which only the newest are kept.

use leasehold_core::Name;
use leasehold_core::store::{Clock, LogEntry, LogItem, LogRead};

use super::{DiskStore, LogSpan};
use crate::format::{decode_log, encode_log, log_key, parse_log};
use crate::tree::Broken;

impl DiskStore {
    pub(super) fn append(&mut self, log: Name, clock: Clock, items: &[LogItem]) {
        let span = self.logs.entry(log.clone()).or_insert(LogSpan { first: 1, next: 1 });
        let seq = span.next;
        span.next += 1;
        self.group.appends.push((log, seq, encode_log(clock, items)));
    }

    pub(super) fn log(&self, ask: &LogRead) -> Result<Vec<LogEntry>, Broken> {
        let Some(span) = self.logs.get(&ask.log) else { return Ok(Vec::new()) };
        let first = span.first.max(span.next.saturating_sub(self.options.log_keep.max(1)));
        let from = ask.after.saturating_add(1).max(first);
        let mut out = Vec::new();
        if from >= span.next {
            return Ok(out);
        }
        let range = log_key(&ask.log, from)..log_key(&ask.log, span.next);
        for entry in self.shelf.small.range(range)?.take(ask.limit) {
            let found = match entry {
                Ok((key, value)) => parse_log(&key).and_then(|(_, seq)| decode_log(seq, &value)),
                Err(Broken::Damaged(_)) => None,
                Err(error) => return Err(error),
            };
            match found {
                Some(entry) => out.push(entry),
                None => return self.log_one_by_one(ask, from..span.next),
            }
        }
        Ok(out)
    }

    /// The entries of a log with a damaged part: those that can be read. The others are told.
    fn log_one_by_one(&self, ask: &LogRead, range: std::ops::Range<u64>) -> Result<Vec<LogEntry>, Broken> {
        let mut out = Vec::new();
        for seq in range {
            if out.len() == ask.limit {
                break;
            }
            let found = match self.shelf.small.get(&log_key(&ask.log, seq)) {
                Ok(Some(value)) => decode_log(seq, &value),
                Ok(None) => continue,
                Err(Broken::Damaged(_)) => None,
                Err(error) => return Err(error),
            };
            match found {
                Some(entry) => out.push(entry),
                None => self.shelf.tell_damaged(Name::from(format!("{}#{seq}", ask.log))),
            }
        }
        Ok(out)
    }
}
