//! The one loop that owns the [`Replica`]: take what waits, step, perform the outputs.
//!
//! The replica runs on a thread of its own, because a step is pure computation and its pace decides
//! the pace of all. Requests come from the handlers, replies from the store's thread; everything
//! that has come while the thread was busy is stepped in one go.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold_core::replica::Mark;
use leasehold_core::store::StoreError;
use leasehold_core::{
    Config, Failure, Input, Now, Outcome, Output, Outputs, Replica, Request, RequestId, Stats, StoreId,
};
use tokio::sync::oneshot;

use crate::metrics::{Calls, StoreWatch};
use crate::record::{self, Tape};
use crate::store::{Event, StoreHandle};

/// What a handler is told when the driver is gone: the request may have been applied.
const GONE: Failure = Failure::OutcomeUnknown { retry_after_ms: 1_000 };
/// Between two timers that are due at once, so that a timer that stays due does not eat a processor.
const TIMER_PAUSE: Duration = Duration::from_millis(1);
/// Longest wait without looking at the replica's timer.
const IDLE: Duration = Duration::from_secs(60);

/// What comes in.
enum Message {
    Ask { id: RequestId, request: Request, reply: oneshot::Sender<Outcome> },
    Gone(RequestId),
    Look(oneshot::Sender<Look>),
    Stop,
}

/// The replica as seen from outside.
#[derive(Clone, Debug, Default)]
pub struct Look {
    pub stats: Stats,
    /// How often each rare branch was taken.
    pub marks: BTreeMap<Mark, u64>,
    pub store_poisoned: Option<String>,
    /// What is wrong with how the store is set up: it works for now.
    pub store_warning: Option<String>,
}

#[derive(Default)]
struct Inbox {
    messages: Vec<Message>,
    events: Vec<Event>,
    /// The driver waits for a signal.
    asleep: bool,
    /// Nobody takes messages any more.
    closed: bool,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    next_id: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // The inbox holds plain vectors: a panic elsewhere leaves nothing half done in it.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, add: impl FnOnce(&mut Inbox)) {
        let mut inbox = self.lock();
        if inbox.closed {
            return;
        }
        add(&mut inbox);
        let wake = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        if wake {
            self.wake.notify_one();
        }
    }
}

/// Where a store delivers to: handed to whoever opens the store.
#[derive(Clone)]
pub struct Deliver(Arc<Shared>);

impl Deliver {
    pub fn deliver(&self, events: Vec<Event>) {
        self.0.push(|inbox| inbox.events.extend(events));
    }
}

/// The way to the replica. Cheap to clone.
#[derive(Clone)]
pub struct Driver {
    shared: Arc<Shared>,
    watch: Arc<StoreWatch>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

impl std::fmt::Debug for Deliver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Deliver")
    }
}

/// The thread, to be waited for.
#[derive(Debug)]
pub struct Running {
    driver: Driver,
    thread: JoinHandle<()>,
}

/// Starts a replica on the store that `open` makes.
pub fn start<S: StoreHandle, E>(
    config: Config,
    seed: [u8; 32],
    record: Option<&record::Settings>,
    open: impl FnOnce(Deliver) -> Result<S, E>,
) -> Result<Running, E>
where
    E: From<std::io::Error>,
{
    let shared = Arc::new(Shared::default());
    let tape = record.map(Tape::start).transpose()?;
    let store = open(Deliver(shared.clone()))?;
    let watch = Arc::new(StoreWatch::new(store.folder()));
    let driver = Driver { shared: shared.clone(), watch: watch.clone() };
    let thread = std::thread::Builder::new().name("leasehold-replica".into()).spawn(move || {
        Loop::new(config, seed, store, shared, watch, tape).run();
    })?;
    Ok(Running { driver, thread })
}

/// The system's randomness: no two starts may share ids.
pub fn seed() -> std::io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|e| std::io::Error::other(format!("no randomness from the system: {e}")))?;
    Ok(seed)
}

impl Running {
    pub fn driver(&self) -> Driver {
        self.driver.clone()
    }

    /// Ends the loop after what is waiting now, and closes the store. Blocks.
    pub fn stop(self) {
        self.driver.shared.push(|inbox| inbox.messages.push(Message::Stop));
        if self.thread.join().is_err() {
            tracing::error!("the replica's thread had panicked");
        }
    }
}

/// Lets handlers know that nobody listens, also after a panic.
struct CloseInbox(Arc<Shared>);

impl Drop for CloseInbox {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.closed = true;
        // Dropping the messages drops their reply channels: whoever waits is told.
        let messages = std::mem::take(&mut inbox.messages);
        drop(inbox);
        drop(messages);
    }
}

impl Driver {
    /// Asks the replica. If the returned future is dropped, the replica is told that nobody waits.
    pub async fn ask(&self, request: Request) -> Outcome {
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        let mut waiting = Waiting { shared: &self.shared, id, answered: false };
        self.shared.push(|inbox| inbox.messages.push(Message::Ask { id, request, reply }));
        let outcome = answer.await;
        waiting.answered = true;
        outcome.unwrap_or(Err(GONE))
    }

    /// Asks until `gone`. `None`: the replica was told that nobody waits, before it had answered, and sees to it
    /// that nothing is left of it. What it had answered by then is given: a slot that was granted must be given
    /// back by somebody.
    pub async fn ask_unless(&self, request: Request, gone: impl Future<Output = ()>) -> Option<Outcome> {
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (reply, mut answer) = oneshot::channel();
        self.shared.push(|inbox| inbox.messages.push(Message::Ask { id, request, reply }));
        tokio::select! {
            biased;
            outcome = &mut answer => return Some(outcome.unwrap_or(Err(GONE))),
            () = gone => {}
        }
        self.shared.push(|inbox| inbox.messages.push(Message::Gone(id)));
        answer.await.ok()
    }

    pub fn store_watch(&self) -> &StoreWatch {
        &self.watch
    }

    pub async fn look(&self) -> Option<Look> {
        let (reply, answer) = oneshot::channel();
        self.shared.push(|inbox| inbox.messages.push(Message::Look(reply)));
        answer.await.ok()
    }
}

struct Waiting<'a> {
    shared: &'a Shared,
    id: RequestId,
    answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.push(|inbox| inbox.messages.push(Message::Gone(self.id)));
        }
    }
}

struct Loop<S> {
    replica: Replica,
    store: S,
    shared: Arc<Shared>,
    start: Instant,
    out: Outputs,
    waiting: HashMap<RequestId, oneshot::Sender<Outcome>>,
    marks: BTreeMap<Mark, u64>,
    calls: Calls,
    watch: Arc<StoreWatch>,
    /// Calls to the store that it would not take.
    refused: Vec<StoreId>,
    stop: bool,
    /// Before the tape, whose end may take a while: who waits is told at once.
    _close: CloseInbox,
    tape: Option<Tape>,
}

impl<S: StoreHandle> Loop<S> {
    fn new(
        config: Config,
        seed: [u8; 32],
        store: S,
        shared: Arc<Shared>,
        watch: Arc<StoreWatch>,
        tape: Option<Tape>,
    ) -> Self {
        Loop {
            replica: Replica::new(config, seed),
            store,
            _close: CloseInbox(shared.clone()),
            shared,
            start: Instant::now(),
            out: Outputs::new(),
            waiting: HashMap::new(),
            marks: BTreeMap::new(),
            calls: Calls::default(),
            watch,
            refused: Vec::new(),
            tape,
            stop: false,
        }
    }

    fn now(&self) -> Now {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(Now::MAX)
    }

    fn run(mut self) {
        let (mut messages, mut events) = (Vec::new(), Vec::new());
        let mut fired = None;
        // The first step lets the replica set its timer.
        self.step(Input::Timer);
        while !self.stop {
            if let Some(tape) = &mut self.tape {
                tape.flush();
            }
            self.take(&mut messages, &mut events, fired);
            // Requests before the store's replies: a commit that a reply sets free then goes out
            // with everything that has come meanwhile.
            for message in messages.drain(..) {
                self.message(message);
            }
            for event in events.drain(..) {
                let input = match event {
                    Event::Reply { id, reply } => {
                        self.calls.over(id, true, &self.watch);
                        Input::StoreReply { id, reply }
                    }
                    Event::Notified(topic) => Input::Notified { topic },
                    Event::Damaged(key) => {
                        self.watch.damaged.fetch_add(1, Ordering::Relaxed);
                        tracing::error!(%key, "what is stored under this key is not what was written there");
                        continue;
                    }
                    Event::Fault(what) => {
                        tracing::error!("the store has met a fault, and goes on: {what}");
                        continue;
                    }
                    Event::Stopped(why) => {
                        tracing::error!("the store has stopped, and will be opened anew: {why}");
                        continue;
                    }
                    Event::Working => {
                        tracing::info!("the store was opened anew, has proven that it writes, and serves again");
                        continue;
                    }
                };
                self.step(input);
            }
            for id in std::mem::take(&mut self.refused) {
                self.step(Input::StoreReply { id, reply: Err(StoreError::Unavailable) });
            }
            fired = None;
            let now = self.now();
            if self.replica.next_timer().is_some_and(|at| at <= now) {
                self.step(Input::Timer);
                fired = Some(now);
            }
        }
        self.store.close();
    }

    /// Waits until something has come or the timer is due, and takes everything.
    fn take(&self, messages: &mut Vec<Message>, events: &mut Vec<Event>, fired: Option<Now>) {
        let mut inbox = self.shared.lock();
        if inbox.messages.is_empty() && inbox.events.is_empty() && self.refused.is_empty() {
            let wait = match self.replica.next_timer() {
                None => IDLE,
                Some(at) => Duration::from_millis(at.saturating_sub(self.now())).min(IDLE),
            };
            let wait = if fired.is_some() { wait.max(TIMER_PAUSE) } else { wait };
            if !wait.is_zero() {
                inbox.asleep = true;
                let idle = |i: &mut Inbox| i.messages.is_empty() && i.events.is_empty();
                let waited = self.shared.wake.wait_timeout_while(inbox, wait, idle);
                (inbox, _) = waited.unwrap_or_else(PoisonError::into_inner);
                inbox.asleep = false;
            }
        }
        std::mem::swap(&mut inbox.messages, messages);
        std::mem::swap(&mut inbox.events, events);
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Ask { id, request, reply } => {
                self.waiting.insert(id, reply);
                self.step(Input::Request { id, request });
            }
            Message::Gone(id) => {
                if self.waiting.remove(&id).is_some() {
                    self.step(Input::Cancelled { id });
                }
            }
            Message::Look(reply) => {
                let look = Look {
                    stats: self.replica.stats(),
                    marks: self.marks.clone(),
                    store_poisoned: self.store.poisoned(),
                    store_warning: self.store.warning(),
                };
                // Whoever asked may have gone.
                let _ = reply.send(look);
            }
            Message::Stop => self.stop = true,
        }
    }

    fn step(&mut self, input: Input) {
        let now = self.now();
        if let Some(tape) = &mut self.tape {
            tape.begin(&self.replica, now, &input);
        }
        self.replica.step(now, input, &mut self.out);
        if let Some(tape) = &mut self.tape {
            tape.end(&self.out);
        }
        for output in self.out.drain(..) {
            match output {
                Output::Store { id, op } => {
                    self.calls.sent(id, &op, &self.watch);
                    if !self.store.send(id, op) {
                        self.calls.over(id, false, &self.watch);
                        self.refused.push(id);
                    }
                }
                Output::Reply { id, outcome } => {
                    if let Some(reply) = self.waiting.remove(&id) {
                        // Whoever asked may have gone just now.
                        let _ = reply.send(outcome);
                    }
                }
                Output::Mark(mark) => {
                    let count = self.marks.entry(mark).or_default();
                    *count += 1;
                    log_mark(mark);
                }
            }
        }
    }
}

fn log_mark(mark: Mark) {
    match mark {
        Mark::BreakerOpened => tracing::warn!("the store cannot be reached: requests are refused until it can"),
        Mark::BreakerClosed => tracing::info!("the store can be reached again"),
        Mark::JobLost => tracing::error!("a job's record has vanished from the store"),
        Mark::JobQuarantined => tracing::error!("a job's record cannot be read: it is in quarantine"),
        Mark::NewerFormat => tracing::error!("the store holds records of a newer release: nothing is claimed here"),
        Mark::SettledUnknown => tracing::warn!("a commit's outcome stayed unknown"),
        Mark::MailboxFull => tracing::debug!("too much in work: a request was refused"),
        Mark::JobReindexed => tracing::warn!("a job's index entry was missing and was put back"),
        other => tracing::debug!(mark = ?other, "mark"),
    }
}
