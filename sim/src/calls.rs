//! The ledger: every call that anybody made, when it was under way, and what was answered. It is what
//! the oracle holds the replicas to.

use std::sync::Arc;

use leasehold_core::{Failure, JobId, Outcome, Request};

pub type CallId = u32;

/// Who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Caller {
    Client(u8),
    /// Of groups.
    Owner(u8),
    Worker(u8),
    /// Of pools.
    User(u8),
    Operator,
    Auditor,
    Script,
}

/// What the caller learned.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    Answer(Outcome),
    /// Nobody listened: certainly not delivered.
    NotDelivered,
    /// The connection broke, or the caller stopped waiting.
    Nothing,
}

/// How one request of a call ended, as its replica told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Not answered (yet): it may have effects.
    Open,
    Done,
    /// Certainly not applied: from now on it must have no effect.
    Refused(&'static str),
    /// It may have effects, now or later.
    Unknown,
}

#[derive(Clone, Debug)]
pub struct Item {
    pub fate: Fate,
    /// Effects in the store that certainly are this request's.
    pub effects: u32,
    /// Effects that may be this request's or another one's.
    pub shared: u32,
    /// Jobs that were leased to this request, in the order taken.
    pub granted: Vec<JobId>,
}

/// An instant, as the oracle and the replica count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instant {
    /// Changes of the store so far.
    pub change: u64,
    /// The store's clock.
    pub clock: u64,
    /// Good answers of the store that the replica has had.
    pub answers: u64,
    pub now: u64,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub id: CallId,
    pub caller: Caller,
    /// The caller's own mark.
    pub tag: u64,
    pub replica: usize,
    pub request: Arc<Request>,
    pub items: Vec<Item>,
    pub sent: u64,
    /// When it reached the replica, and in which of its lives.
    pub arrived: Option<(Instant, u32)>,
    pub replied: bool,
    pub hung_up: bool,
    pub heard: Option<Heard>,
}

/// One request of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ItemRef {
    pub call: CallId,
    pub item: u32,
}

impl ItemRef {
    /// Text that names this request, to be found again in what it writes.
    pub fn mark(self) -> String {
        format!("{:08x}{:08x}", self.call, self.item)
    }

    /// Reads what [`ItemRef::mark`] wrote, at the end of a text.
    pub fn find(text: &str) -> Option<ItemRef> {
        let tail = text.get(text.len().checked_sub(16)?..)?;
        Some(ItemRef {
            call: u32::from_str_radix(tail.get(..8)?, 16).ok()?,
            item: u32::from_str_radix(tail.get(8..)?, 16).ok()?,
        })
    }
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    calls: Vec<Call>,
}

impl Ledger {
    /// The id that the next call will have.
    pub fn next(&self) -> CallId {
        self.calls.len() as CallId
    }

    pub fn open(&mut self, caller: Caller, tag: u64, replica: usize, request: Request, sent: u64) -> CallId {
        let id = self.next();
        let items = match &request {
            Request::Batch(items) => items.len(),
            _ => 1,
        };
        let item = Item { fate: Fate::Open, effects: 0, shared: 0, granted: Vec::new() };
        self.calls.push(Call {
            id,
            caller,
            tag,
            replica,
            request: Arc::new(request),
            items: vec![item; items],
            sent,
            arrived: None,
            replied: false,
            hung_up: false,
            heard: None,
        });
        id
    }

    pub fn len(&self) -> usize {
        self.calls.len()
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Call> {
        self.calls.iter()
    }

    pub fn get(&self, id: CallId) -> Option<&Call> {
        self.calls.get(id as usize)
    }

    pub fn get_mut(&mut self, id: CallId) -> Option<&mut Call> {
        self.calls.get_mut(id as usize)
    }

    pub fn item(&self, at: ItemRef) -> Option<&Item> {
        self.get(at.call)?.items.get(at.item as usize)
    }

    pub fn item_mut(&mut self, at: ItemRef) -> Option<&mut Item> {
        self.get_mut(at.call)?.items.get_mut(at.item as usize)
    }

    pub fn request(&self, at: ItemRef) -> Option<&Request> {
        self.get(at.call)?.part(at.item)
    }

    /// Whether a request that was delivered may (still) have effects.
    pub fn may_apply(&self, at: ItemRef) -> bool {
        self.get(at.call).is_some_and(|c| c.arrived.is_some())
            && self.item(at).is_some_and(|i| matches!(i.fate, Fate::Open | Fate::Unknown))
    }
}

impl Call {
    pub fn part(&self, item: u32) -> Option<&Request> {
        match &*self.request {
            Request::Batch(items) => items.get(item as usize),
            request => (item == 0).then_some(request),
        }
    }

    pub fn parts(&self) -> impl Iterator<Item = (ItemRef, &Request)> {
        (0..self.items.len() as u32).filter_map(|item| Some((ItemRef { call: self.id, item }, self.part(item)?)))
    }
}

/// The fate that an answer tells.
pub fn fate(outcome: &Outcome) -> Fate {
    match outcome {
        Ok(_) => Fate::Done,
        Err(failure) if failure.certain() => Fate::Refused(failure.code()),
        Err(_) => Fate::Unknown,
    }
}

/// Whether it is worth asking again, and after how many milliseconds.
pub fn again_after(failure: &Failure) -> Option<u64> {
    failure.retry_after_ms()
}
