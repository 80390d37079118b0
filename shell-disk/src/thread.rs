//! The store's thread: takes everything that waits, makes it durable together, delivers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold_core::store::{Commit, Each, Store, StoreError, Txn, Value, Write};
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};

use crate::store::{DiskStore, Stopped};
use crate::tree::told;

/// Calls in one group, at most.
const GROUP_OPS: usize = 1_024;
/// Bytes to be written in one group, unless a single commit is larger.
const GROUP_BYTES: usize = 16 * 1024 * 1024;
/// Groups between two steps of housekeeping while the store is busy.
const BUSY_GROUPS: u32 = 16;
/// Wait before a step of housekeeping while the store is idle.
const IDLE: Duration = Duration::from_millis(250);
/// Wait before a store that has stopped is opened anew: doubled each time that fails.
const REOPEN_MIN: Duration = Duration::from_millis(100);
const REOPEN_MAX: Duration = Duration::from_secs(10);

/// What the store's thread delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The answer to one [`Handle::send`]; exactly one for each.
    Reply { id: StoreId, reply: Result<StoreAnswer, StoreError> },
    /// A durable commit notified this topic.
    Notified(Name),
    /// What is stored under this key is not what was written there.
    Damaged(Name),
    /// Something on disk is not as it should be, and was survived.
    Fault(String),
    /// The store has stopped: until [`Event::Working`] every call is answered as not applied.
    Stopped(String),
    /// The store has been opened anew, and has proven that it writes.
    Working,
}

/// The way to a store that runs on its own thread. Dropping it is like [`Handle::close`].
#[derive(Debug)]
pub struct Handle {
    sender: Option<Sender<(StoreId, StoreOp)>>,
    thread: Option<JoinHandle<()>>,
    state: Arc<State>,
}

/// Why the store has stopped; `None` while it works.
#[derive(Debug, Default)]
struct State(Mutex<Option<String>>);

impl State {
    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says so when the thread ends by a panic.
struct Sentinel(Arc<State>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *self.0.lock() = Some("the store's thread has panicked".into());
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
            *state.lock() = Some(format!("no thread could be started for the store: {error}"));
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

    /// Why the store does not work at present, if so. It is opened anew until it does.
    pub fn poisoned(&self) -> Option<String> {
        self.state.lock().clone()
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
            *self.state.lock() = Some("the store's thread has panicked".into());
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The store, or what is left of it.
enum Run {
    Working(Box<DiskStore>),
    Stopped { rest: Box<Stopped>, again: Instant, wait: Duration },
}

fn run(store: DiskStore, receiver: &Receiver<(StoreId, StoreOp)>, deliver: &impl Fn(Vec<Event>), sentinel: &Sentinel) {
    let state = &sentinel.0;
    let mut run = Run::Working(Box::new(store));
    let mut work = Work::default();
    loop {
        run = match run {
            Run::Working(mut store) => {
                match receiver.recv_timeout(if work.more { Duration::ZERO } else { IDLE }) {
                    Ok(first) => work.group(&mut store, gather(first, receiver), deliver),
                    Err(RecvTimeoutError::Timeout) => work.tidy(&mut store),
                    Err(RecvTimeoutError::Disconnected) => {
                        store.close();
                        *state.lock() = store.poisoned().map(str::to_owned);
                        return;
                    }
                }
                let faults: Vec<Event> = store.faults().into_iter().map(Event::Fault).collect();
                if !faults.is_empty() {
                    deliver(faults);
                }
                let why = work.panicked.take().or_else(|| store.poisoned().map(str::to_owned));
                match why {
                    None => Run::Working(store),
                    Some(why) => {
                        *state.lock() = Some(why.clone());
                        deliver(vec![Event::Stopped(why)]);
                        let rest = store.stop();
                        Run::Stopped { rest, again: Instant::now() + REOPEN_MIN, wait: REOPEN_MIN }
                    }
                }
            }
            Run::Stopped { rest, again, wait } => {
                let left = again.saturating_duration_since(Instant::now());
                match receiver.recv_timeout(left) {
                    Ok(first) => {
                        let refuse = |(id, _)| Event::Reply { id, reply: Err(StoreError::Unavailable) };
                        deliver(gather(first, receiver).into_iter().map(refuse).collect());
                        // However many calls come, it is tried again.
                        match left.is_zero() {
                            true => reopen(rest, wait, state, deliver),
                            false => Run::Stopped { rest, again, wait },
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => reopen(rest, wait, state, deliver),
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }
}

fn reopen(rest: Box<Stopped>, wait: Duration, state: &State, deliver: &impl Fn(Vec<Event>)) -> Run {
    match rest.reopen() {
        Ok(store) => {
            *state.lock() = None;
            deliver(vec![Event::Working]);
            Run::Working(Box::new(store))
        }
        Err((rest, error)) => {
            let why = error.to_string();
            if state.lock().replace(why.clone()).is_none_or(|before| before != why) {
                deliver(vec![Event::Stopped(why)]);
            }
            let wait = (2 * wait).min(REOPEN_MAX);
            Run::Stopped { rest, again: Instant::now() + wait, wait }
        }
    }
}

#[derive(Default)]
struct Work {
    groups: u32,
    /// Housekeeping has more to do.
    more: bool,
    panicked: Option<String>,
}

impl Work {
    fn group(&mut self, store: &mut DiskStore, group: Vec<(StoreId, StoreOp)>, deliver: &impl Fn(Vec<Event>)) {
        let kinds: Vec<(StoreId, bool)> = group.iter().map(|(id, op)| (*id, matches!(op, StoreOp::Read(_)))).collect();
        // A read that comes before every commit does not wait for their sync.
        let reads = kinds.iter().take_while(|(_, read)| *read).count();
        let mut answered = Vec::with_capacity(kinds.len());
        let mut early = Vec::with_capacity(reads);
        let mut late = Vec::with_capacity(kinds.len() - reads + 2);
        let processed = catch_unwind(AssertUnwindSafe(|| {
            store.process(group, |id, reply| {
                let event = Event::Reply { id, reply };
                answered.push(id);
                if answered.len() > reads {
                    late.push(event);
                    return;
                }
                early.push(event);
                if answered.len() == reads {
                    deliver(std::mem::take(&mut early));
                }
            });
        }));
        late.append(&mut early);
        if let Err(panic) = processed {
            self.panicked = Some(format!("the store has panicked: {}", told(&*panic)));
            late.extend(kinds.into_iter().filter(|(id, _)| !answered.contains(id)).map(|(id, read)| {
                let error = if read { StoreError::Unavailable } else { StoreError::Unknown };
                Event::Reply { id, reply: Err(error) }
            }));
        } else {
            late.extend(store.notified().into_iter().map(Event::Notified));
        }
        late.extend(store.damaged().into_iter().map(Event::Damaged));
        if !late.is_empty() {
            deliver(late);
        }
        self.groups += 1;
        if self.groups >= BUSY_GROUPS && self.panicked.is_none() {
            self.tidy(store);
        }
    }

    fn tidy(&mut self, store: &mut DiskStore) {
        self.groups = 0;
        match catch_unwind(AssertUnwindSafe(|| store.tidy())) {
            Ok(more) => self.more = more,
            Err(panic) => self.panicked = Some(format!("the store has panicked: {}", told(&*panic))),
        }
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
