//! The store's thread: takes everything that waits, makes it durable together, delivers.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold_core::store::{Commit, Each, Store, StoreError, Txn, Value, Write};
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};

use crate::store::DiskStore;

/// Calls in one group, at most.
const GROUP_OPS: usize = 1_024;
/// Bytes to be written in one group, unless a single commit is larger.
const GROUP_BYTES: usize = 16 * 1024 * 1024;
/// Groups between two steps of housekeeping while the store is busy.
const BUSY_GROUPS: u32 = 16;
/// Wait before a step of housekeeping while the store is idle.
const IDLE: Duration = Duration::from_millis(250);

/// What the store's thread delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The answer to one [`Handle::send`]; exactly one for each.
    Reply { id: StoreId, reply: Result<StoreAnswer, StoreError> },
    /// A durable commit notified this topic.
    Notified(Name),
    /// What is stored under this key is not what was written there.
    Damaged(Name),
}

/// The way to a store that runs on its own thread. Dropping it is like [`Handle::close`].
#[derive(Debug)]
pub struct Handle {
    sender: Option<Sender<(StoreId, StoreOp)>>,
    thread: Option<JoinHandle<()>>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    poisoned: OnceLock<String>,
}

/// Says so when the thread ends by a panic.
struct Sentinel(Arc<State>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.poisoned.set("the store's thread has panicked".into());
        }
    }
}

/// Gives the store a thread. `deliver` is called on it, with events in batches; it must not block
/// for long, because nothing else is made durable meanwhile.
pub fn spawn(store: DiskStore, deliver: impl Fn(Vec<Event>) + Send + 'static) -> Handle {
    let (sender, receiver) = channel();
    let state = Arc::new(State::default());
    let sentinel = Sentinel(state.clone());
    let thread = std::thread::Builder::new()
        .name("leasehold-store".into())
        .spawn(move || run(store, &receiver, &deliver, &sentinel));
    let thread = match thread {
        Ok(thread) => Some(thread),
        Err(error) => {
            let _ = state.poisoned.set(format!("no thread could be started for the store: {error}"));
            None
        }
    };
    Handle { sender: Some(sender), thread, state }
}

impl Handle {
    /// Sends a call; its answer is delivered. Returns false if the thread is gone (see
    /// [`Handle::poisoned`]): then nothing was done and nothing is delivered.
    pub fn send(&self, id: StoreId, op: StoreOp) -> bool {
        self.sender.as_ref().is_some_and(|s| s.send((id, op)).is_ok())
    }

    /// Why the store does not work any more, if so. Reopening it is the only way out.
    pub fn poisoned(&self) -> Option<&str> {
        self.state.poisoned.get().map(String::as_str)
    }

    /// Finishes and delivers all that was sent, syncs, and gives the folder free.
    pub fn close(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            let _ = self.state.poisoned.set("the store's thread has panicked".into());
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.finish();
    }
}

fn run(
    mut store: DiskStore,
    receiver: &Receiver<(StoreId, StoreOp)>,
    deliver: &impl Fn(Vec<Event>),
    sentinel: &Sentinel,
) {
    let mut groups = 0;
    let mut more = false;
    loop {
        match receiver.recv_timeout(if more { Duration::ZERO } else { IDLE }) {
            Ok(first) => {
                let group = gather(first, receiver);
                // A read that comes before every commit does not wait for their sync.
                let reads = group.iter().take_while(|(_, op)| matches!(op, StoreOp::Read(_))).count();
                let mut early = Vec::with_capacity(reads);
                let mut late = Vec::with_capacity(group.len() - reads + 2);
                let mut left = reads;
                store.process(group, |id, reply| {
                    let event = Event::Reply { id, reply };
                    if left == 0 {
                        late.push(event);
                        return;
                    }
                    left -= 1;
                    early.push(event);
                    if left == 0 {
                        deliver(std::mem::take(&mut early));
                    }
                });
                late.extend(store.notified().into_iter().map(Event::Notified));
                late.extend(store.damaged().into_iter().map(Event::Damaged));
                if !late.is_empty() {
                    deliver(late);
                }
                groups += 1;
                if groups >= BUSY_GROUPS {
                    groups = 0;
                    more = store.tidy();
                }
            }
            Err(RecvTimeoutError::Timeout) => more = store.tidy(),
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if let Some(why) = store.poisoned() {
            let _ = sentinel.0.poisoned.set(why.into());
        }
    }
    store.close();
    if let Some(why) = store.poisoned() {
        let _ = sentinel.0.poisoned.set(why.into());
    }
}

fn gather(first: (StoreId, StoreOp), receiver: &Receiver<(StoreId, StoreOp)>) -> Vec<(StoreId, StoreOp)> {
    let mut bytes = weight(&first.1);
    let mut group = vec![first];
    while group.len() < GROUP_OPS && bytes < GROUP_BYTES {
        let Ok(next) = receiver.try_recv() else { break };
        bytes += weight(&next.1);
        group.push(next);
    }
    group
}

/// Roughly the bytes that a call may write.
fn weight(op: &StoreOp) -> usize {
    match op {
        StoreOp::Read(_) => 0,
        StoreOp::Commit(Commit { txns, .. }) => txns.iter().map(|t| txn_weight(t)).sum(),
    }
}

fn txn_weight(txn: &Txn) -> usize {
    let writes = txn.writes.iter().map(|w| match w {
        Write::Put { value: Value::Bytes(bytes), .. } | Write::Append { bytes, .. } => 64 + bytes.len(),
        _ => 64,
    });
    let each = txn.take.iter().flat_map(|t| {
        let each = t.from.iter().flat_map(|s| &s.each).map(|e| match e {
            Each::Put { bytes, .. } => 64 + bytes.len(),
            _ => 64,
        });
        std::iter::once(t.n.saturating_mul(each.max().unwrap_or_default()))
    });
    writes.chain(each).fold(0, usize::saturating_add)
}
