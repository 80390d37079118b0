//! Housekeeping: what has expired leaves the disk.

use bytes::Bytes;
use leasehold_core::store::Clock;
use leasehold_core::{Name, limits};

use super::DiskStore;
use crate::format::{expiry_key, parse_expiry};
use crate::journal::{Batch, Place};
use crate::shelf;
use crate::tree::Broken;

/// A record is removed so long after its expiry: longer than any clock can be thought to be wrong.
const GARBAGE_AFTER: u64 = limits::MINUTE;
/// Records that one step of housekeeping removes, at least and at most.
const GARBAGE_MIN: usize = 500;
const GARBAGE_MAX: usize = 10_000;
/// The clock handed out to reads may be so far past the largest one on disk.
const CLOCK_LAG: u64 = 10 * limits::SECOND;

impl DiskStore {
    /// Removes records that expired more than a minute ago, oldest first.
    pub(super) fn collect(&mut self) -> Result<bool, Broken> {
        let clock = self.tick();
        let until = clock.saturating_sub(GARBAGE_AFTER);
        let limit = (2 * std::mem::take(&mut self.expiring)).clamp(GARBAGE_MIN, GARBAGE_MAX);
        let mut batch = Batch::default();
        let mut from = self.garbage_from.min(until);
        let (entries, damaged) = self.expired(from, until, limit)?;
        let met = entries.len();
        for entry in entries {
            let parsed = parse_expiry(&entry).map(|(expiry, key)| (expiry, Name::new(key)));
            let (expiry, key) = parsed.ok_or_else(|| Broken::Undecodable(Name::new(&entry)))?;
            // The record may have been put anew, or its expiry moved: then another entry speaks of it.
            if let Some(head) = self.shelf.head_on_disk(&key)?.filter(|h| h.expiry == Some(expiry)) {
                self.shelf.forget(&key);
                shelf::remove(&mut batch, &key, shelf::is_apart(&head));
            }
            batch.remove(Place::Small, entry);
            from = expiry;
        }
        if self.clock_seen > self.clock_kept + CLOCK_LAG {
            self.keep_clock(&mut batch);
        }
        if !batch.is_empty() {
            self.durable.commit(batch)?;
        }
        if let Some(what) = damaged {
            self.durable.fault(format!("some expired records stay on disk: {what}"));
            // From behind the damage on, everything below the limit has been looked at.
            self.garbage_from = if met < limit { self.garbage_from.max(until) } else { self.garbage_from };
        } else {
            self.garbage_from = if met < limit { self.garbage_from.max(until) } else { from };
        }
        Ok(met == limit)
    }

    /// Entries that tell of expired records, oldest first; where some cannot be read, those before and,
    /// from the end, those behind.
    fn expired(&self, from: Clock, until: Clock, limit: usize) -> Result<(Vec<Bytes>, Option<String>), Broken> {
        let range = || self.shelf.small.range(expiry_key(from, b"")..expiry_key(until, b""));
        let mut entries = Vec::new();
        for entry in range()?.take(limit) {
            match entry {
                Ok((key, _)) => entries.push(key),
                Err(Broken::Damaged(what)) => {
                    let left = limit - entries.len();
                    entries.extend(range()?.rev().take(left).map_while(Result::ok).map(|(key, _)| key));
                    return Ok((entries, Some(what)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok((entries, None))
    }
}
