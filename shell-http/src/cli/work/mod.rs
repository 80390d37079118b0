//! `leasehold work`: a command for each job, with everything that a worker has to get right.
//!
//! A claim carries an id and is repeated with it, so that a lost answer loses no lease. While the
//! command runs the lease is renewed at a third of its length; when the server says that the lease
//! is gone or the job cancelled, the command is ended. While renewals are not answered nothing more
//! is claimed. A result that is there is kept, and its completion repeated, until the server has
//! answered.

mod attempt;
mod command;
mod lease;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use clap::{Args, ValueHint};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use super::client::{Call, Client, Pause, Trouble, unique};
use super::signals::Signals;
use super::{Failed, Outage, To, time};
use attempt::Attempt;

/// How long a claim waits at the server for jobs.
const WAIT_MS: u64 = 20_000;
/// How long giving leases back may take when told to end.
const FAREWELL: Duration = Duration::from_secs(2);

/// Run a command for each job of a queue
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The command gets the payload on standard input; what it prints is the job's result. In its environment:
  LEASEHOLD_JOB_ID, LEASEHOLD_QUEUE       what it works on
  LEASEHOLD_ATTEMPT, LEASEHOLD_DELIVERY   counted attempts, and hand-outs, this one included
  LEASEHOLD_TOKEN                         the lease's token, as a fence: of one job later ones sort after
  LEASEHOLD_CONTENT_TYPE                  the payload's
  LEASEHOLD_SERVER, TRACEPARENT           the server, and the submit's trace if it has one

How it ends decides what becomes of the job:
  0                        succeeded, with the output as result
  65, or what --not-retryable names
                           dead: another attempt would end the same
  any other, a signal, or longer than --timeout
                           tried again, as the job's policy says
A failure's message is the end of standard error, up to 4 KiB.

The lease is renewed while the command runs. If it is lost or the job cancelled, the command and all that
it has started are ended: SIGTERM, and SIGKILL 3 s later. While renewals are not answered nothing more is
claimed; a result is kept and sent until it is answered.

SIGTERM or SIGINT: nothing more is claimed, what has not started is given back, what runs is finished. A
second one ends what runs and gives its jobs back.

With --json each attempt that ended is an object on a line of its own, {\"id\", \"queue\", \"attempt\",
\"outcome\", \"ms\", \"why\"?}; outcomes: succeeded, failed, released, lost.

Examples:
  leasehold work --queue docs --concurrency 4 -- wc -w
  leasehold work --queue urgent --queue docs --timeout 10m -- ./convert --strict
  leasehold work --queue docs --exit-when-idle -- sh -c 'tr a-z A-Z'

Exit codes: 0 ended as told (also if jobs failed), 1 could not go on (the command cannot be started, a
claim was refused), 2 wrong usage.")]
pub struct Work {
    #[command(flatten)]
    to: To,
    /// The queue; may be given more than once, the first one goes first
    #[arg(long = "queue", required = true, value_name = "QUEUE")]
    queues: Vec<String>,
    /// Jobs at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    concurrency: u32,
    /// What this worker is called [default: made up]
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,
    /// Length of a lease; it is renewed at a third of it
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(300..=86_400_000))]
    lease_ms: u64,
    /// End a command that runs for longer; its attempt has failed
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
    /// Exit codes after which a job is not tried again
    #[arg(long, value_name = "CODES", value_delimiter = ',', default_value = "65",
        value_parser = clap::value_parser!(u8).range(1..))]
    not_retryable: Vec<u8>,
    /// End when there is nothing to do
    #[arg(long)]
    exit_when_idle: bool,
    /// Content type of results [default: text/plain if they are UTF-8]; application/json: JSON
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Print JSON, an object for each attempt
    #[arg(long)]
    pub json: bool,
    /// Say on standard error how each attempt ended
    #[arg(long, short)]
    verbose: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    command: Vec<String>,
}

#[derive(Deserialize)]
struct Claimed {
    jobs: Vec<Leased>,
}

/// A job as it is leased.
#[derive(Deserialize)]
struct Leased {
    id: String,
    token: String,
    attempt: u32,
    delivery: u32,
    queue: String,
    #[serde(default, deserialize_with = "present")]
    payload: Option<Box<RawValue>>,
    payload_base64: Option<String>,
    content_type: Option<String>,
    traceparent: Option<String>,
}

/// A payload may well be null.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(d).map(Some)
}

/// How far this worker has been told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    No,
    /// Begin nothing more.
    Beginning,
    /// End what runs.
    Everything,
}

/// What the worker and its attempts tell each other.
#[derive(Clone)]
struct Shared {
    stopping: watch::Receiver<Stop>,
    /// Leases whose last renewal was not answered.
    failing: Arc<watch::Sender<usize>>,
    /// Why nothing can be run at all.
    broken: mpsc::Sender<String>,
    tally: Arc<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    succeeded: AtomicU64,
    failed: AtomicU64,
    released: AtomicU64,
    lost: AtomicU64,
}

/// Why there is no answer to a claim.
enum Ended {
    Told,
    Failed(Failed),
}

impl Work {
    pub async fn run(self) -> Result<(), Failed> {
        let (stop, stopping) = watch::channel(Stop::No);
        listen_for_signals(Signals::new()?, stop);
        let (broken, mut is_broken) = mpsc::channel::<String>(1);
        let shared =
            Shared { stopping, failing: Arc::new(watch::channel(0).0), broken, tally: Arc::new(Tally::default()) };
        let worker = self.worker.clone().unwrap_or_else(|| format!("work-{}-{}", std::process::id(), unique()));
        let work = Arc::new(self);
        let slots = Arc::new(Semaphore::new(work.concurrency as usize));
        let ended = work.claims(&worker, &slots, &shared, &mut is_broken).await;
        // All slots free: everything that ran is through.
        let _ = slots.acquire_many(work.concurrency).await;
        let tally = &shared.tally;
        let counts = [&tally.succeeded, &tally.failed, &tally.released, &tally.lost].map(|n| n.load(Relaxed));
        if counts.iter().any(|n| *n > 0) {
            let [succeeded, failed, released, lost] = counts;
            say!("{succeeded} succeeded, {failed} failed, {released} given back, {lost} lost");
        }
        match (ended, is_broken.try_recv()) {
            (Ok(()) | Err(Ended::Told), Ok(why)) => Err(Failed::Because(why)),
            (Err(Ended::Failed(failed)), _) => Err(failed),
            (Ok(()) | Err(Ended::Told), Err(_)) => Ok(()),
        }
    }

    /// Claims and begins what was claimed, until told to end or idle.
    async fn claims(
        self: &Arc<Self>,
        worker: &str,
        slots: &Arc<Semaphore>,
        shared: &Shared,
        is_broken: &mut mpsc::Receiver<String>,
    ) -> Result<(), Ended> {
        let mut client = Client::new(self.to.server.clone());
        let mut outage = Outage::default();
        let mut told = shared.stopping.clone();
        loop {
            let free = tokio::select! {
                biased;
                _ = told.wait_for(|s| *s > Stop::No) => return Err(Ended::Told),
                Some(why) = is_broken.recv() => return Err(Ended::Failed(Failed::Because(why))),
                free = take(slots) => free,
            };
            let busy = free.len() < self.concurrency as usize;
            // Who ends when idle asks without waiting, but not in a circle while others still run.
            let wait_ms = match (self.exit_when_idle, busy) {
                (false, _) => WAIT_MS,
                (true, true) => 1_000,
                (true, false) => 0,
            };
            let claim_id = unique();
            let claim = self.claim(worker, free.len(), wait_ms, &claim_id);
            let asked = tokio::select! {
                biased;
                _ = told.wait_for(|s| *s > Stop::No) => Err(Ended::Told),
                Some(why) = is_broken.recv() => Err(Ended::Failed(Failed::Because(why))),
                asked = ask(&mut client, &claim, &mut outage, shared.failing.subscribe()) => asked.map_err(Ended::Failed),
            };
            let (jobs, repeated) = match asked {
                Ok(asked) => asked,
                Err(ended) => {
                    // It may have been granted already: its repeat gives the same leases.
                    let again = self.claim(worker, free.len(), 0, &claim_id);
                    drop(client);
                    let given = tokio::time::timeout(FAREWELL, self.give_back(&again, shared));
                    if given.await.is_err() {
                        say!("the server does not answer: a lease that it may have given will lapse");
                    }
                    return Err(ended);
                }
            };
            if jobs.is_empty() && self.exit_when_idle && !busy {
                return Ok(());
            }
            for (job, slot) in jobs.into_iter().zip(free) {
                let attempt = Attempt { work: self.clone(), job, shared: shared.clone(), is_old: repeated };
                tokio::spawn(async move {
                    attempt.run().await;
                    drop(slot);
                });
            }
        }
    }

    fn claim(&self, worker: &str, max: usize, wait_ms: u64, claim_id: &str) -> Call {
        let body = json!({
            "worker": worker, "queues": self.queues, "max": max, "wait_ms": wait_ms,
            "lease_ms": self.lease_ms, "claim_id": claim_id,
        });
        let mut call = Call::post("/v1/claims", body.to_string());
        call.wait = Duration::from_millis(wait_ms);
        call
    }

    /// Asks once more for what a claim was given, and gives it back.
    async fn give_back(self: &Arc<Self>, claim: &Call, shared: &Shared) {
        let mut client = Client::new(self.to.server.clone());
        // What the server refuses to claim has not been claimed.
        let Ok(answer) = client.insist(claim, None, &mut |_| {}).await else { return };
        let Ok(claimed) = serde_json::from_slice::<Claimed>(&answer.body) else { return };
        for job in claimed.jobs {
            Attempt { work: self.clone(), job, shared: shared.clone(), is_old: true }.never_began(&mut client).await;
        }
    }
}

/// At least one slot, then all that are free.
async fn take(slots: &Arc<Semaphore>) -> Vec<OwnedSemaphorePermit> {
    let mut free = Vec::new();
    if let Ok(first) = slots.clone().acquire_owned().await {
        free.push(first);
    }
    while let Ok(more) = slots.clone().try_acquire_owned() {
        free.push(more);
    }
    free
}

/// Repeats one claim until it is answered, but not while renewals are not: a server that cannot take
/// a heartbeat must not give out more. Also says whether it was repeated: the leases may be old then.
async fn ask(
    client: &mut Client,
    claim: &Call,
    outage: &mut Outage,
    mut failing: watch::Receiver<usize>,
) -> Result<(Vec<Leased>, bool), Failed> {
    let mut pause = Pause::new();
    let mut repeated = false;
    loop {
        // The sender is ours: it is there.
        let _ = failing.wait_for(|n| *n == 0).await;
        let answer = tokio::select! {
            biased;
            _ = failing.wait_for(|n| *n > 0) => {
                repeated = true;
                continue;
            }
            answer = client.call(claim) => answer,
        };
        match answer {
            Ok(answer) => {
                outage.over();
                let claimed: Claimed = serde_json::from_slice(&answer.body)
                    .map_err(|e| Failed::Because(format!("the answer to a claim cannot be read: {e}")))?;
                return Ok((claimed.jobs, repeated));
            }
            Err(Trouble::Refused(refused)) => return Err(refused.into()),
            Err(trouble) => {
                repeated = true;
                outage.trouble(&trouble);
                pause.wait(&trouble).await;
            }
        }
    }
}

fn listen_for_signals(mut signals: Signals, stop: watch::Sender<Stop>) {
    tokio::spawn(async move {
        for (level, what) in [
            (Stop::Beginning, "nothing more is begun; what runs is finished"),
            (Stop::Everything, "what runs is ended and given back"),
        ] {
            signals.next().await;
            say!("told to end: {what}");
            stop.send_replace(level);
        }
        // The sender must stay: as long as it does, nobody takes its absence for a signal.
        std::future::pending::<()>().await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_payload_is_a_payload() {
        let text = r#"{"jobs":[{"id":"a","token":"t","attempt":1,"delivery":1,"queue":"q","payload":null},
            {"id":"b","token":"t","attempt":1,"delivery":2,"queue":"q","payload_omitted":true},
            {"id":"c","token":"t","attempt":1,"delivery":3,"queue":"q","payload": {"x" : 1}}]}"#;
        let claimed: Claimed = serde_json::from_str(text).unwrap();
        let payloads: Vec<_> = claimed.jobs.iter().map(|j| j.payload.as_ref().map(|p| p.get())).collect();
        assert_eq!(payloads, [Some("null"), None, Some("{\"x\" : 1}")]);
        let ids: std::collections::BTreeSet<_> = claimed.jobs.iter().map(|j| j.id.as_str()).collect();
        assert_eq!(ids.len(), 3);
    }
}
