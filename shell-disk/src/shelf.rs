//! Records on disk, seen through what the present group of commits has changed of them.

use std::cell::RefCell;
use std::collections::HashMap;

use bytes::Bytes;
use leasehold_core::Name;
use leasehold_core::store::engine::{Head, Records, Stored};
use leasehold_core::store::{Clock, Version};

use crate::format::{APART, decode_record, encode_record, expiry_key};
use crate::journal::{Batch, Place};
use crate::tree::{Broken, Tree};

pub(crate) struct Shelf {
    pub records: Tree,
    pub bytes: Tree,
    pub small: Tree,
    /// What the group has looked at or changed. Emptied with every group.
    group: RefCell<HashMap<Name, Slot>>,
    changed: bool,
    recent: RefCell<Recent>,
    damaged: RefCell<Vec<Name>>,
    /// The largest key on disk under each prefix (up to the first `/`). New records mostly have keys
    /// above it, and are then known to be absent without a look at the disk.
    tops: HashMap<Box<[u8]>, Name>,
    /// Why the largest keys are not known: then the disk is asked.
    unsure: Option<String>,
}

/// Records lately read or written, as they are on disk: a record that was put is mostly looked at
/// again soon. Two generations; what is not used while the younger fills is dropped.
#[derive(Default)]
struct Recent {
    young: HashMap<Name, Item>,
    old: HashMap<Name, Item>,
    bytes: usize,
}

/// Bytes of one generation.
const RECENT_BYTES: usize = 24 * 1024 * 1024;
/// What an entry costs besides its bytes.
const RECENT_ENTRY: usize = 160;

impl Recent {
    fn get(&mut self, key: &Name) -> Option<Item> {
        if let Some(item) = self.young.get(key) {
            return Some(item.clone());
        }
        let item = self.old.remove(key)?;
        self.put(key.clone(), item.clone());
        Some(item)
    }

    fn put(&mut self, key: Name, item: Item) {
        self.bytes += RECENT_ENTRY + item.bytes.as_ref().map_or(0, Bytes::len);
        self.young.insert(key, item);
        if self.bytes > RECENT_BYTES {
            self.bytes = 0;
            self.old = std::mem::take(&mut self.young);
        }
    }

    fn remove(&mut self, key: &Name) {
        self.young.remove(key);
        self.old.remove(key);
    }
}

/// A key up to and including its first `/`.
fn prefix(key: &[u8]) -> &[u8] {
    let end = key.iter().position(|b| *b == b'/').map_or(key.len(), |at| at + 1);
    key.get(..end).unwrap_or(key)
}

/// What comes right after all keys of a prefix.
fn past(prefix: &[u8]) -> Vec<u8> {
    let mut past = prefix.to_vec();
    match past.last_mut() {
        Some(last @ b'/') => *last += 1,
        // A key without `/` is alone with itself.
        _ => past.push(0),
    }
    past
}

#[derive(Clone)]
struct Slot {
    /// As the group sees it.
    now: Option<Item>,
    /// As it is on disk.
    disk: Option<Head>,
    change: Change,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    None,
    Frame,
    Whole,
}

#[derive(Clone)]
struct Item {
    head: Head,
    /// `None`: apart, and as they are on disk.
    bytes: Option<Bytes>,
}

fn apart(head: &Head) -> bool {
    head.len > APART
}

impl Shelf {
    pub(crate) fn new([records, bytes, small]: [Tree; 3]) -> Result<Self, Broken> {
        let (tops, unsure) = match tops(&records) {
            Ok(tops) => (tops, None),
            Err(Broken::Damaged(why)) => (HashMap::new(), Some(format!("a table of records cannot be read: {why}"))),
            Err(error) => return Err(error),
        };
        Ok(Shelf {
            records,
            bytes,
            small,
            group: RefCell::default(),
            changed: false,
            recent: RefCell::default(),
            damaged: RefCell::default(),
            tops,
            unsure,
        })
    }

    /// What was found damaged when this was made.
    pub(crate) fn unsure(&self) -> Option<String> {
        self.unsure.clone()
    }

    fn load(&self, key: &Name) -> Result<Option<Item>, Broken> {
        if self.unsure.is_none() && self.tops.get(prefix(key)).is_none_or(|top| *key > *top) {
            return Ok(None);
        }
        if let Some(item) = self.recent.borrow_mut().get(key) {
            return Ok(Some(item));
        }
        let value = match self.records.get(key) {
            Ok(Some(value)) => value,
            Ok(None) => return Ok(None),
            Err(Broken::Damaged(_)) => return Ok(Some(self.damage(key))),
            Err(error) => return Err(error),
        };
        let Some((head, bytes)) = decode_record(&value) else { return Ok(Some(self.damage(key))) };
        let item = Item { head, bytes };
        self.recent.borrow_mut().put(key.clone(), item.clone());
        Ok(Some(item))
    }

    /// A record that is there and cannot be read: given as one without bytes and of a version that
    /// nobody draws, so that whoever reads it sees that it is damaged, and can say so and guard by it.
    fn damage(&self, key: &Name) -> Item {
        self.tell_damaged(key.clone());
        let head = Head { version: Version(0), at: 0, expiry: None, len: 0 };
        Item { head, bytes: Some(Bytes::new()) }
    }

    pub(crate) fn tell_damaged(&self, key: Name) {
        let mut damaged = self.damaged.borrow_mut();
        if !damaged.contains(&key) {
            damaged.push(key);
        }
    }

    /// Records found damaged since this was last asked.
    pub(crate) fn take_damaged(&self) -> Vec<Name> {
        self.damaged.take()
    }

    /// That a record is about to be removed behind the group's back.
    pub(crate) fn forget(&self, key: &Name) {
        self.recent.borrow_mut().remove(key);
    }

    fn whole(&self, key: &Name, item: Item) -> Result<Stored, Broken> {
        let Head { version, at, expiry, len } = item.head;
        let bytes = match item.bytes {
            Some(bytes) => bytes,
            None => {
                let bytes = match self.bytes.get(key) {
                    Ok(bytes) => bytes.filter(|b| b.len() == len),
                    Err(Broken::Damaged(_)) => None,
                    Err(error) => return Err(error),
                };
                match bytes {
                    Some(bytes) => bytes,
                    None => {
                        self.damage(key);
                        Bytes::new()
                    }
                }
            }
        };
        Ok(Stored { version, at, expiry, bytes })
    }

    /// Does something with what the group sees under a key.
    fn with<T>(&self, key: &Name, f: impl FnOnce(&mut Slot) -> T) -> Result<T, Broken> {
        let mut group = self.group.borrow_mut();
        if let Some(slot) = group.get_mut(key) {
            return Ok(f(slot));
        }
        let now = self.load(key)?;
        let disk = now.as_ref().map(|i| i.head);
        let mut slot = Slot { now, disk, change: Change::None };
        let result = f(&mut slot);
        group.insert(key.clone(), slot);
        Ok(result)
    }

    /// What is on disk under a key; only between groups.
    pub(crate) fn head_on_disk(&self, key: &Name) -> Result<Option<Head>, Broken> {
        Ok(self.load(key)?.map(|i| i.head))
    }

    /// Whether the group has changed any record.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    /// Forgets the group.
    pub(crate) fn clear(&mut self) {
        self.changed = false;
        let group = self.group.get_mut();
        group.clear();
        group.shrink_to(4_096);
    }

    /// Adds the group's changes, one write for each key, and tells each new expiry.
    pub(crate) fn write(&mut self, batch: &mut Batch, mut expires: impl FnMut(Clock)) {
        self.changed = false;
        let recent = self.recent.get_mut();
        for (key, slot) in self.group.get_mut().drain() {
            if slot.change == Change::None {
                continue;
            }
            let had_apart = slot.disk.as_ref().is_some_and(apart);
            let Some(item) = slot.now else {
                recent.remove(&key);
                if slot.disk.is_some() {
                    remove(batch, &key, had_apart);
                }
                continue;
            };
            let separate = apart(&item.head);
            let inline = item.bytes.as_deref().filter(|_| !separate);
            batch.insert(Place::Records, key.to_bytes(), encode_record(&item.head, inline));
            let kept = Item { head: item.head, bytes: item.bytes.clone().filter(|_| !separate) };
            match item.bytes {
                Some(bytes) if separate && slot.change == Change::Whole => {
                    batch.insert(Place::Bytes, key.to_bytes(), bytes)
                }
                _ if had_apart && !separate => batch.remove(Place::Bytes, key.to_bytes()),
                _ => {}
            }
            if let Some(expiry) = item.head.expiry
                && slot.disk.is_none_or(|d| d.expiry != Some(expiry))
            {
                batch.insert(Place::Small, expiry_key(expiry, &key), Bytes::new());
                expires(expiry);
            }
            match self.tops.get_mut(prefix(&key)) {
                Some(top) if *top >= key => {}
                Some(top) => *top = key.clone(),
                None => {
                    self.tops.insert(prefix(&key).into(), key.clone());
                }
            }
            recent.put(key, kept);
        }
    }
}

/// The largest key under each prefix.
fn tops(records: &Tree) -> Result<HashMap<Box<[u8]>, Name>, Broken> {
    let mut tops: HashMap<Box<[u8]>, Name> = HashMap::new();
    let mut from: Vec<u8> = Vec::new();
    while let Some(entry) = records.range(from..)?.next() {
        let first = prefix(&entry?.0).to_vec();
        let end = past(&first);
        // The entry just met is one of them.
        if let Some(last) = records.range(first.clone()..end.clone())?.next_back() {
            tops.insert(first.into(), Name::new(&last?.0));
        }
        from = end;
    }
    Ok(tops)
}

/// Deletes a record.
pub(crate) fn remove(batch: &mut Batch, key: &Name, separate: bool) {
    batch.remove(Place::Records, key.to_bytes());
    if separate {
        batch.remove(Place::Bytes, key.to_bytes());
    }
}

pub(crate) fn is_apart(head: &Head) -> bool {
    apart(head)
}

impl Records for Shelf {
    type Error = Broken;

    fn get(&self, key: &Name) -> Result<Option<Stored>, Broken> {
        let seen = self.group.borrow().get(key).map(|slot| slot.now.clone());
        let item = match seen {
            Some(item) => item,
            None => self.load(key)?,
        };
        item.map(|item| self.whole(key, item)).transpose()
    }

    fn head(&self, key: &Name) -> Result<Option<Head>, Broken> {
        self.with(key, |slot| slot.now.as_ref().map(|i| i.head))
    }

    fn set(&mut self, key: &Name, record: Option<Stored>) -> Result<Option<Stored>, Broken> {
        self.changed |= self.with(key, |slot| {
            if slot.now.is_none() && record.is_none() {
                return false;
            }
            slot.now = record.map(|r| Item { head: r.head(), bytes: Some(r.bytes) });
            slot.change = Change::Whole;
            true
        })?;
        Ok(None)
    }

    fn expire(&mut self, key: &Name, expiry: Option<Clock>) -> Result<Option<(Stored, Stored)>, Broken> {
        self.changed |= self.with(key, |slot| {
            let Some(item) = &mut slot.now else { return false };
            item.head.expiry = expiry;
            slot.change = slot.change.max(Change::Frame);
            true
        })?;
        Ok(None)
    }
}
