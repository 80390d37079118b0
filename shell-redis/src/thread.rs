//! The store's thread: sends what comes, pipelined on one connection, and delivers the answers;
//! looks for the primary anew when the connection is of no use any more.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold_core::store::StoreError;
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};
use redis::ConnectionInfo;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::call::{Caller, Outcome, random};
use crate::link::{ConnectError, Link};
use crate::listen::{self, Place};
use crate::{Address, Options};

/// How long a start waits for a server that is not there.
const FIRST: Duration = Duration::from_secs(5);
/// Wait before a connection is tried again: doubling from the first to the last, and up to half as
/// much by chance, so that many servers do not come back at once.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(800));
/// Between two looks at what the server says of itself.
const LOOK: Duration = Duration::from_secs(15);
/// Calls taken up at once.
const MANY: usize = 256;

/// What the store's thread delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The answer to one [`Handle::send`]; exactly one for each.
    Reply { id: StoreId, reply: Result<StoreAnswer, StoreError> },
    /// A commit, of this or of another server, notified this topic.
    Notified(Name),
    /// What is stored under this name is not what was written there.
    Damaged(Name),
}

/// How things stand, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Why there is no connection, if there is none.
    pub unreachable: Option<String>,
    /// What is wrong with how the server is set up, if anything.
    pub warning: Option<String>,
    /// `redis 7.0.15`, once it has been seen.
    pub version: String,
}

/// The way to a store that runs on its own thread. Dropping it is like [`Handle::close`].
#[derive(Debug)]
pub struct Handle {
    sender: Option<mpsc::UnboundedSender<(StoreId, StoreOp)>>,
    thread: Option<JoinHandle<()>>,
    condition: Arc<Mutex<Condition>>,
}

impl Handle {
    /// Sends a call; its answer is delivered. Returns false if the thread is gone: then nothing was
    /// done and nothing is delivered.
    pub fn send(&self, id: StoreId, op: StoreOp) -> bool {
        self.sender.as_ref().is_some_and(|s| s.send((id, op)).is_ok())
    }

    /// How things stand now.
    pub fn condition(&self) -> Condition {
        lock(&self.condition).clone()
    }

    /// Whether the thread is gone, which nothing but a panic makes it.
    pub fn is_gone(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the answers to all that was sent, delivers them, and hangs up.
    pub fn close(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the store's thread had panicked");
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.finish();
    }
}

fn lock(condition: &Mutex<Condition>) -> std::sync::MutexGuard<'_, Condition> {
    condition.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects, and gives the connection a thread. `deliver` is called on it, with events in batches; it
/// must not block for long.
///
/// A server that is not there yet is waited for in the background: calls are answered
/// [`StoreError::Unavailable`] until it comes.
///
/// # Errors
/// [`ConnectError::Refused`]: as things are configured this will not work.
pub fn spawn(
    address: &Address,
    options: Options,
    deliver: impl Fn(Vec<Event>) + Send + 'static,
) -> Result<Handle, ConnectError> {
    options.check().map_err(ConnectError::Refused)?;
    let servers = address.servers().map_err(ConnectError::Refused)?;
    let io = |e: std::io::Error| ConnectError::Unreachable(e.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    let caller = Arc::new(Caller::new(&options));
    let condition = Arc::new(Mutex::new(Condition::default()));
    let link = runtime.block_on(first(&options, &caller, &servers))?;
    let (sender, calls) = mpsc::unbounded_channel();
    let (found, place) = watch::channel(None);
    let (heard, topics) = mpsc::channel(64);
    let listener = listen::listen(caller.clone(), servers.clone(), place, heard);
    let mut run = Run {
        options,
        caller,
        servers,
        deliver: Box::new(deliver),
        condition: condition.clone(),
        found,
        epoch: 0,
        state: State::Waiting { until: Instant::now(), next: BACK_OFF.0 },
        parked: VecDeque::new(),
        tasks: JoinSet::new(),
        events: Vec::new(),
    };
    match link {
        Ok(link) => run.connected(link),
        Err(why) => run.disconnected(why),
    }
    let thread = std::thread::Builder::new()
        .name("leasehold-redis".into())
        .spawn(move || {
            runtime.block_on(async move {
                let listener = tokio::spawn(listener);
                run.run(calls, topics).await;
                listener.abort();
            });
        })
        .map_err(io)?;
    Ok(Handle { sender: Some(sender), thread: Some(thread), condition })
}

/// The first connection: a refusal is an error, anything else is tried again for a while.
async fn first(
    options: &Options,
    caller: &Caller,
    servers: &[ConnectionInfo],
) -> Result<Result<Link, String>, ConnectError> {
    let until = Instant::now() + FIRST;
    loop {
        match Link::connect(options, &caller.layout, &caller.scripts, servers).await {
            Ok(link) => return Ok(Ok(link)),
            Err(error @ ConnectError::Refused(_)) => return Err(error),
            Err(ConnectError::Unreachable(why)) if Instant::now() >= until => return Ok(Err(why)),
            Err(ConnectError::Unreachable(_)) => tokio::time::sleep(BACK_OFF.1 / 4).await,
        }
    }
}

type Connecting = Pin<Box<dyn Future<Output = Result<Link, ConnectError>> + Send>>;

enum State {
    Connected { link: Link, look: Instant },
    Connecting { attempt: Connecting, next: Duration },
    Waiting { until: Instant, next: Duration },
}

/// What a task brings back.
enum Done {
    Call { id: StoreId, epoch: u64, outcome: Outcome },
    Look { epoch: u64, link: Result<Link, String> },
}

struct Run {
    options: Options,
    caller: Arc<Caller>,
    servers: Vec<ConnectionInfo>,
    deliver: Box<dyn Fn(Vec<Event>) + Send>,
    condition: Arc<Mutex<Condition>>,
    found: watch::Sender<Place>,
    /// How many connections there have been: what an old one says is nothing against a new one.
    epoch: u64,
    state: State,
    /// Calls that came while a connection was being made.
    parked: VecDeque<(StoreId, StoreOp)>,
    tasks: JoinSet<Done>,
    events: Vec<Event>,
}

impl Run {
    async fn run(
        &mut self,
        mut calls: mpsc::UnboundedReceiver<(StoreId, StoreOp)>,
        mut topics: mpsc::Receiver<Vec<Name>>,
    ) {
        let mut open = true;
        let mut taken = Vec::new();
        while open || !self.tasks.is_empty() || !self.parked.is_empty() {
            let until = match &self.state {
                State::Connected { look, .. } => *look,
                State::Waiting { until, .. } => *until,
                State::Connecting { .. } => Instant::now() + LOOK,
            };
            tokio::select! {
                Some(done) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    self.done(done.ok());
                    while let Some(done) = self.tasks.try_join_next() {
                        self.done(done.ok());
                    }
                }
                n = calls.recv_many(&mut taken, MANY), if open => {
                    open = n > 0;
                    for (id, op) in taken.drain(..) {
                        self.call(id, op);
                    }
                }
                Some(found) = topics.recv() => self.events.extend(found.into_iter().map(Event::Notified)),
                result = attempt(&mut self.state) => match result {
                    Ok(link) => self.connected(link),
                    Err(error) => self.disconnected(error.to_string()),
                },
                () = tokio::time::sleep_until(until) => self.tick(),
            }
            if !self.events.is_empty() {
                (self.deliver)(std::mem::take(&mut self.events));
            }
        }
    }

    fn call(&mut self, id: StoreId, op: StoreOp) {
        match &self.state {
            State::Connected { link, .. } => {
                let (caller, mut link, epoch) = (self.caller.clone(), link.clone(), self.epoch);
                self.tasks.spawn(async move {
                    let outcome = caller.perform(&mut link, &op, None).await;
                    Done::Call { id, epoch, outcome }
                });
            }
            State::Connecting { .. } => self.parked.push_back((id, op)),
            State::Waiting { .. } => self.events.push(Event::Reply { id, reply: Err(StoreError::Unavailable) }),
        }
    }

    fn done(&mut self, done: Option<Done>) {
        match done {
            Some(Done::Call { id, epoch, outcome }) => {
                let Outcome { reply, reconnect, why, damaged, topics } = outcome;
                if let Some(why) = why {
                    tracing::debug!(%why, ?reply, "a call was not answered as it should be");
                    if reconnect && epoch == self.epoch && matches!(self.state, State::Connected { .. }) {
                        self.disconnected(why);
                        // Soon, the first time: mostly the server was just started anew.
                    }
                }
                self.events.push(Event::Reply { id, reply });
                self.events.extend(topics.into_iter().map(Event::Notified));
                self.events.extend(damaged.into_iter().map(Event::Damaged));
            }
            Some(Done::Look { epoch, link }) if epoch == self.epoch => match link {
                Ok(fresh) if fresh.about.replica => self.disconnected("the server has become a replica".into()),
                Ok(fresh) => {
                    self.report(&fresh);
                    if let State::Connected { link, .. } = &mut self.state {
                        link.about = fresh.about;
                    }
                }
                Err(why) => self.disconnected(why),
            },
            // A task that panicked has no answer; the core gives a call up by itself.
            Some(Done::Look { .. }) | None => {}
        }
    }

    fn tick(&mut self) {
        match &mut self.state {
            State::Connected { link, look } => {
                *look = Instant::now() + LOOK;
                let (mut link, epoch) = (link.clone(), self.epoch);
                self.tasks.spawn(async move {
                    let looked = link.look().await;
                    Done::Look { epoch, link: looked.map(|()| link).map_err(|e| e.to_string()) }
                });
            }
            State::Waiting { next, .. } => {
                let (options, caller, servers) = (self.options.clone(), self.caller.clone(), self.servers.clone());
                let next = *next;
                let attempt: Connecting =
                    Box::pin(async move { Link::connect(&options, &caller.layout, &caller.scripts, &servers).await });
                self.state = State::Connecting { attempt, next };
            }
            State::Connecting { .. } => {}
        }
    }

    fn connected(&mut self, link: Link) {
        self.epoch += 1;
        let server = link.server;
        tracing::info!(server = %link.about.version, "connected to the store");
        self.report(&link);
        self.state = State::Connected { link, look: Instant::now() + LOOK };
        // Nobody listens any more only when all ends.
        let _ = self.found.send(Some((server, self.epoch)));
        for (id, op) in std::mem::take(&mut self.parked) {
            self.call(id, op);
        }
    }

    fn disconnected(&mut self, why: String) {
        let next = match &self.state {
            State::Connecting { next, .. } | State::Waiting { next, .. } => *next,
            State::Connected { .. } => BACK_OFF.0,
        };
        let jitter = random() % (next.as_millis() as u64 / 2 + 1);
        self.state = State::Waiting {
            until: Instant::now() + next + Duration::from_millis(jitter),
            next: (next * 2).min(BACK_OFF.1),
        };
        for (id, _) in self.parked.drain(..) {
            self.events.push(Event::Reply { id, reply: Err(StoreError::Unavailable) });
        }
        let mut condition = lock(&self.condition);
        if condition.unreachable.as_ref() != Some(&why) {
            tracing::warn!(%why, "the store cannot be used");
        }
        condition.unreachable = Some(why);
    }

    fn report(&self, link: &Link) {
        let warning = link.about.evicts();
        let mut condition = lock(&self.condition);
        if let Some(warning) = warning.as_ref().filter(|w| condition.warning.as_ref() != Some(w)) {
            tracing::warn!("{warning}");
        }
        *condition = Condition { unreachable: None, warning, version: link.about.version.clone() };
    }
}

/// The attempt under way, or for ever nothing.
async fn attempt(state: &mut State) -> Result<Link, ConnectError> {
    match state {
        State::Connecting { attempt, .. } => attempt.await,
        State::Connected { .. } | State::Waiting { .. } => std::future::pending().await,
    }
}
