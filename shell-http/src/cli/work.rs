//! `leasehold work`: a command for each job, with everything that a worker has to get right.
//!
//! A claim carries an id and is repeated with it, so that a lost answer loses no lease. While the
//! command runs the lease is renewed at a third of its length; when the server says that the lease
//! is gone or the job cancelled, the command is ended. A result that is there is kept, and its
//! completion repeated, until the server has answered.

use std::io;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use bytes::Bytes;
use clap::Args;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, watch};

use super::client::{Call, Client, Pause, Refused, Server, Trouble, unique};
use super::{Failed, Outage, To, printable};
use crate::wire::json::Object;

/// Bytes of standard error that are sent with a failure.
const TAIL: usize = 4 * 1024;
/// Bytes of standard output that can be a result.
const RESULT: u64 = leasehold_core::limits::PAYLOAD_BYTES as u64;
/// Between asking a command to end and ending it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a claim waits at the server for jobs.
const WAIT_MS: u64 = 20_000;
/// How long giving leases back may take when told twice to end.
const FAREWELL: Duration = Duration::from_secs(2);

/// Run a command for each job of a queue
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The command gets the payload on standard input, and LEASEHOLD_JOB_ID, LEASEHOLD_ATTEMPT, LEASEHOLD_QUEUE
and TRACEPARENT in its environment. Its standard output is the job's result. If it ends with a status
other than 0, the attempt fails with the end of its standard error; the job is tried again as its policy
says.

SIGTERM or SIGINT: nothing more is claimed, what runs is finished. A second one ends what runs and gives
its jobs back.

Examples:
  leasehold work --queue docs --concurrency 4 -- wc -w
  leasehold work --queue docs --exit-when-idle -- sh -c 'tr a-z A-Z'

Exit codes: 0 ended as told, 1 could not go on, 2 wrong usage.")]
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
    /// End when there is nothing to do
    #[arg(long)]
    exit_when_idle: bool,
    /// Content type of results [default: text/plain if they are UTF-8]; application/json: JSON
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
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
    queue: String,
    #[serde(default, deserialize_with = "present")]
    payload: Option<Box<RawValue>>,
    payload_base64: Option<String>,
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
    /// Claim nothing more.
    Claiming,
    /// End what runs.
    Everything,
}

impl Work {
    pub async fn run(self) -> Result<(), Failed> {
        let (stop, stopping) = watch::channel(Stop::No);
        let stop = Arc::new(stop);
        listen_for_signals(stop.clone())?;
        let worker = self.worker.clone().unwrap_or_else(|| format!("work-{}-{}", std::process::id(), unique()));
        let work = Arc::new(self);
        let slots = Arc::new(Semaphore::new(work.concurrency as usize));
        let (broken, mut is_broken) = mpsc::channel::<String>(1);
        let mut client = Client::new(work.to.server.clone());
        let mut outage = Outage::default();
        let mut told = stopping.clone();
        let result = loop {
            // At least one slot, then all that are free.
            let first = tokio::select! {
                biased;
                _ = told.wait_for(|s| *s > Stop::No) => break Ok(()),
                Some(why) = is_broken.recv() => break Err(Failed::Because(why)),
                first = slots.clone().acquire_owned() => first,
            };
            let Ok(first) = first else { break Ok(()) };
            let mut free = vec![first];
            while let Ok(more) = slots.clone().try_acquire_owned() {
                free.push(more);
            }
            let busy = free.len() < work.concurrency as usize;
            let claim = work.claim(&worker, free.len(), busy);
            let claimed = tokio::select! {
                biased;
                // The server notices the cut connection and puts back what it may have given.
                _ = told.wait_for(|s| *s > Stop::No) => break Ok(()),
                Some(why) = is_broken.recv() => break Err(Failed::Because(why)),
                claimed = ask(&mut client, &claim, &mut outage) => claimed,
            };
            let jobs = match claimed {
                Ok(jobs) => jobs,
                Err(failed) => break Err(failed),
            };
            if jobs.is_empty() && work.exit_when_idle && !busy {
                break Ok(());
            }
            for (job, slot) in jobs.into_iter().zip(free) {
                let attempt = Attempt { work: work.clone(), job, stopping: stopping.clone(), broken: broken.clone() };
                tokio::spawn(async move {
                    attempt.run().await;
                    drop(slot);
                });
            }
        };
        // All slots free: everything that ran is through.
        let _ = slots.acquire_many(work.concurrency).await;
        match (result, is_broken.try_recv()) {
            (Ok(()), Ok(why)) => Err(Failed::Because(why)),
            (result, _) => result,
        }
    }

    fn claim(&self, worker: &str, max: usize, busy: bool) -> Call {
        // Who ends when idle asks without waiting, but not in a circle while others still run.
        let wait_ms = match (self.exit_when_idle, busy) {
            (false, _) => WAIT_MS,
            (true, true) => 1_000,
            (true, false) => 0,
        };
        let body = json!({
            "worker": worker, "queues": self.queues, "max": max, "wait_ms": wait_ms,
            "lease_ms": self.lease_ms, "claim_id": unique(),
        });
        let mut call = Call::post("/v1/claims", body.to_string());
        call.wait = Duration::from_millis(wait_ms);
        call
    }
}

/// Repeats one claim until it is answered.
async fn ask(client: &mut Client, claim: &Call, outage: &mut Outage) -> Result<Vec<Leased>, Failed> {
    let answer = client.insist(claim, &mut |t| outage.trouble(t)).await?;
    outage.over();
    let claimed: Claimed = serde_json::from_slice(&answer.body)
        .map_err(|e| Failed::Because(format!("the answer to a claim cannot be read: {e}")))?;
    Ok(claimed.jobs)
}

fn listen_for_signals(stop: Arc<watch::Sender<Stop>>) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        for (level, what) in [
            (Stop::Claiming, "nothing more is claimed; what runs is finished"),
            (Stop::Everything, "what runs is ended and given back"),
        ] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            eprintln!("leasehold: told to end: {what}");
            stop.send_replace(level);
        }
    });
    Ok(())
}

/// One job under one lease.
struct Attempt {
    work: Arc<Work>,
    job: Leased,
    stopping: watch::Receiver<Stop>,
    broken: mpsc::Sender<String>,
}

/// What came of the command.
enum Ran {
    Result(Vec<u8>),
    Failed {
        message: String,
        kind: String,
        retryable: bool,
    },
    /// The server took the job away.
    Taken(String),
    /// This worker was told twice to end.
    Stopped,
    /// The command cannot be started at all.
    Broken(String),
}

impl Attempt {
    async fn run(self) {
        let (taken, mut is_taken) = watch::channel(None::<String>);
        let beats = tokio::spawn(heartbeats(
            self.work.to.server.clone(),
            self.job.id.clone(),
            self.job.token.clone(),
            Duration::from_millis(self.work.lease_ms / 3),
            taken,
        ));
        let mut client = Client::new(self.work.to.server.clone());
        let ran = self.execute(&mut client, &mut is_taken).await;
        let told = match ran {
            Ran::Taken(why) => Err(why),
            Ran::Stopped => self.release(&mut client).await,
            Ran::Broken(why) => {
                let released = self.release(&mut client).await;
                // One message is enough: the first.
                let _ = self.broken.try_send(why);
                released
            }
            Ran::Result(result) => self.complete(&mut client, result, &mut is_taken).await,
            Ran::Failed { message, kind, retryable } => {
                self.fail(&mut client, &message, &kind, retryable, &mut is_taken).await
            }
        };
        beats.abort();
        if let Err(why) = told {
            eprintln!("leasehold: job {}: {}", printable(&self.job.id), printable(&why));
        }
    }

    /// Runs the command, unless the job is taken away before it is through.
    async fn execute(&self, client: &mut Client, is_taken: &mut watch::Receiver<Option<String>>) -> Ran {
        let mut stopping = self.stopping.clone();
        let payload = tokio::select! {
            payload = self.payload(client) => payload,
            why = taken_away(is_taken) => return Ran::Taken(why),
            () = everything(&mut stopping) => return Ran::Stopped,
        };
        let payload = match payload {
            Ok(payload) => payload,
            Err(refused) => return Ran::Taken(refused.to_string()),
        };
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                let program = self.work.command.first().map(String::as_str).unwrap_or_default();
                return match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                        Ran::Broken(format!("{program} cannot be started: {error}"))
                    }
                    _ => Ran::Failed {
                        message: format!("the command could not be started: {error}"),
                        kind: "spawn".into(),
                        retryable: true,
                    },
                };
            }
        };
        let group = child.id();
        let mut talk = pin!(talk(&mut child, payload));
        let why = tokio::select! {
            spoken = talk.as_mut() => return match spoken {
                Ok(spoken) => self.judge(spoken),
                Err(error) => {
                    end(group, std::future::ready(())).await;
                    let message = format!("the command's output could not be read: {error}");
                    Ran::Failed { message, kind: "io".into(), retryable: true }
                }
            },
            why = taken_away(is_taken) => Ran::Taken(why),
            () = everything(&mut stopping) => Ran::Stopped,
        };
        // Its output is still read: a command that cleans up must not die of a closed pipe.
        let through = async {
            // Nobody wants the result any more.
            let _ = talk.await;
        };
        end(group, through).await;
        why
    }

    /// The payload's bytes: with the lease, or fetched if it was too large for that.
    async fn payload(&self, client: &mut Client) -> Result<Bytes, Refused> {
        match (&self.job.payload, &self.job.payload_base64) {
            (Some(json), _) => Ok(Bytes::copy_from_slice(json.get().as_bytes())),
            (None, Some(text)) => match base64::engine::general_purpose::STANDARD.decode(text) {
                Ok(bytes) => Ok(bytes.into()),
                Err(_) => self.fetch(client).await,
            },
            (None, None) => self.fetch(client).await,
        }
    }

    async fn fetch(&self, client: &mut Client) -> Result<Bytes, Refused> {
        let call = Call::get(format!("/v1/jobs/{}/payload", self.job.id));
        Ok(client.insist(&call, &mut |_| {}).await?.body)
    }

    fn spawn(&self) -> io::Result<Child> {
        let (program, arguments) =
            self.work.command.split_first().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LEASEHOLD_JOB_ID", &self.job.id)
            .env("LEASEHOLD_ATTEMPT", self.job.attempt.to_string())
            .env("LEASEHOLD_QUEUE", &self.job.queue)
            .env("LEASEHOLD_SERVER", self.work.to.server.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: it is ended together with what it has started, and a terminal's
            // interrupt reaches only the worker, which lets it finish.
            .process_group(0)
            .kill_on_drop(true);
        match &self.job.traceparent {
            Some(traceparent) => command.env("TRACEPARENT", traceparent),
            None => command.env_remove("TRACEPARENT"),
        };
        command.spawn()
    }

    fn judge(&self, spoken: Spoken) -> Ran {
        let Spoken { status, output, tail, too_long } = spoken;
        if !status.success() {
            let kind = match (status.code(), std::os::unix::process::ExitStatusExt::signal(&status)) {
                (Some(code), _) => format!("exit_{code}"),
                (None, Some(signal)) => format!("signal_{signal}"),
                (None, None) => "exit".into(),
            };
            let tail = String::from_utf8_lossy(&tail).trim().to_owned();
            let message = if tail.is_empty() { format!("the command ended with {status}") } else { tail };
            return Ran::Failed { message, kind, retryable: true };
        }
        if too_long {
            let message = format!("the result is larger than {RESULT} bytes");
            return Ran::Failed { message, kind: "result_too_large".into(), retryable: false };
        }
        if self.is_json() && serde_json::from_slice::<&RawValue>(&output).is_err() {
            let message = "the command's output is not JSON".into();
            return Ran::Failed { message, kind: "result_not_json".into(), retryable: true };
        }
        Ran::Result(output)
    }

    fn is_json(&self) -> bool {
        self.work.content_type.as_deref() == Some("application/json")
    }

    async fn complete(
        &self,
        client: &mut Client,
        result: Vec<u8>,
        is_taken: &mut watch::Receiver<Option<String>>,
    ) -> Result<(), String> {
        let mut out = Vec::with_capacity(128 + result.len().div_ceil(3) * 4);
        let mut object = Object::new(&mut out);
        object.str("token", &self.job.token);
        if self.is_json() {
            object.text("result", &result);
        } else if !result.is_empty() {
            let is_text = std::str::from_utf8(&result).is_ok();
            let guess = if is_text { "text/plain; charset=utf-8" } else { "application/octet-stream" };
            object.str("result_base64", &base64::engine::general_purpose::STANDARD.encode(&result));
            object.str("content_type", self.work.content_type.as_deref().unwrap_or(guess));
        }
        object.end();
        match self.tell(client, "complete", out, is_taken).await {
            // The job must not go round and round with a result that is never taken.
            Err(Told::Refused(refused)) if !is_gone(&refused) => {
                let message = format!("the result was refused: {refused}");
                self.fail(client, &message, "result_refused", false, is_taken).await?;
                Err(message)
            }
            other => other.map_err(Told::text),
        }
    }

    async fn fail(
        &self,
        client: &mut Client,
        message: &str,
        kind: &str,
        retryable: bool,
        is_taken: &mut watch::Receiver<Option<String>>,
    ) -> Result<(), String> {
        let error = json!({"message": message, "type": kind});
        let body = json!({"token": self.job.token, "error": error, "retryable": retryable});
        self.tell(client, "fail", body.to_string().into_bytes(), is_taken).await.map_err(Told::text)
    }

    /// Gives the job back. Best effort: otherwise the lease lapses.
    async fn release(&self, client: &mut Client) -> Result<(), String> {
        let body = json!({"token": self.job.token}).to_string();
        let call = Call::post(format!("/v1/jobs/{}/release", self.job.id), body);
        match tokio::time::timeout(FAREWELL, client.insist(&call, &mut |_| {})).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(refused)) => Err(refused.to_string()),
            Err(_) => Err("could not be given back in time: its lease will lapse".into()),
        }
    }

    /// Repeats a call until the server has answered it, or has said that the job is not ours.
    async fn tell(
        &self,
        client: &mut Client,
        what: &str,
        body: Vec<u8>,
        is_taken: &mut watch::Receiver<Option<String>>,
    ) -> Result<(), Told> {
        let call = Call::post(format!("/v1/jobs/{}/{what}", self.job.id), body);
        let mut outage = Outage::default();
        let mut pause = Pause::new();
        let mut stopping = self.stopping.clone();
        loop {
            let trouble = match client.call(&call).await {
                Ok(_) => {
                    outage.over();
                    return Ok(());
                }
                Err(Trouble::Refused(refused)) => return Err(Told::Refused(refused)),
                Err(trouble) => trouble,
            };
            outage.trouble(&trouble);
            tokio::select! {
                () = pause.wait(&trouble) => {}
                // The heartbeat may learn it first. The last try above may still have been applied.
                why = taken_away(is_taken) => return Err(Told::Taken(why)),
                () = everything(&mut stopping) => {
                    return Err(Told::Taken(format!("told to end before the server had answered `{what}`")));
                }
            }
        }
    }
}

enum Told {
    Refused(Refused),
    Taken(String),
}

impl Told {
    fn text(self) -> String {
        match self {
            Told::Refused(refused) => refused.to_string(),
            Told::Taken(why) => why,
        }
    }
}

/// The job is not ours any more, or not at all.
fn is_gone(refused: &Refused) -> bool {
    refused.status == StatusCode::NOT_FOUND || refused.status == StatusCode::CONFLICT
}

async fn taken_away(is_taken: &mut watch::Receiver<Option<String>>) -> String {
    let why = is_taken.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
    match why {
        Some(why) => why,
        // The heartbeats ended without such news: none will come.
        None => std::future::pending().await,
    }
}

async fn everything(stopping: &mut watch::Receiver<Stop>) {
    if stopping.wait_for(|s| *s == Stop::Everything).await.is_err() {
        std::future::pending().await
    }
}

/// Renews the lease until the server says that there is none.
async fn heartbeats(server: Server, id: String, token: String, every: Duration, taken: watch::Sender<Option<String>>) {
    let mut client = Client::new(server);
    let call = Call::post(format!("/v1/jobs/{id}/heartbeat"), json!({"token": token}).to_string());
    loop {
        tokio::time::sleep(every).await;
        // A server that does not answer is asked again soon, well within the lease.
        let why = loop {
            match tokio::time::timeout(every, client.call(&call)).await {
                Ok(Ok(answer)) => match answer.json() {
                    Ok(beat) if beat["cancel_requested"] == true => break Some("job_cancelled".to_owned()),
                    _ => break None,
                },
                Ok(Err(Trouble::Refused(refused))) if is_gone(&refused) => break Some(refused.to_string()),
                Ok(Err(_)) => tokio::time::sleep((every / 8).min(Duration::from_secs(1))).await,
                Err(_) => {}
            }
        };
        if let Some(why) = why {
            taken.send_replace(Some(format!("{why}: the command was ended")));
            return;
        }
    }
}

/// What a command has said.
struct Spoken {
    status: ExitStatus,
    output: Vec<u8>,
    tail: Vec<u8>,
    too_long: bool,
}

/// Feeds the command, listens to it, and waits for its end.
async fn talk(child: &mut Child, payload: Bytes) -> io::Result<Spoken> {
    let input = child.stdin.take();
    let output = child.stdout.take();
    let errors = child.stderr.take();
    let feed = async {
        if let Some(mut input) = input {
            // A command need not read all of its input.
            let _ = input.write_all(&payload).await;
        }
    };
    let ((), output, tail) = tokio::join!(feed, read_result(output), read_tail(errors));
    let (output, too_long) = output?;
    Ok(Spoken { status: child.wait().await?, output, tail: tail?, too_long })
}

async fn read_result(output: Option<impl AsyncRead + Unpin>) -> io::Result<(Vec<u8>, bool)> {
    let Some(mut output) = output else { return Ok((Vec::new(), false)) };
    let mut all = Vec::new();
    (&mut output).take(RESULT).read_to_end(&mut all).await?;
    let rest = tokio::io::copy(&mut output, &mut tokio::io::sink()).await?;
    Ok((all, rest > 0))
}

/// Passes standard error on and keeps its end.
async fn read_tail(errors: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    use std::io::Write as _;
    let Some(mut errors) = errors else { return Ok(Vec::new()) };
    let mut tail = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let n = errors.read(&mut piece).await?;
        if n == 0 {
            return Ok(tail);
        }
        // Whoever reads our standard error may be gone; the job goes on.
        let _ = io::stderr().write_all(&piece[..n]);
        tail.extend_from_slice(&piece[..n]);
        tail.drain(..tail.len().saturating_sub(TAIL));
    }
}

/// Ends the command and what it has started: first asks, then insists.
async fn end(group: Option<u32>, through: impl Future<Output = ()>) {
    let group = group.and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    let kill = |signal| {
        if let Some(group) = group {
            // It may have ended by itself just now.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    };
    kill(rustix::process::Signal::TERM);
    // Whoever is not through by then is not asked again.
    let _ = tokio::time::timeout(PATIENCE, through).await;
    // What the command had started may have outlived it.
    kill(rustix::process::Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_payload_is_a_payload() {
        let text = r#"{"jobs":[{"id":"a","token":"t","attempt":1,"queue":"q","payload":null},
            {"id":"b","token":"t","attempt":1,"queue":"q","payload_omitted":true},
            {"id":"c","token":"t","attempt":1,"queue":"q","payload": {"x" : 1}}]}"#;
        let claimed: Claimed = serde_json::from_str(text).unwrap();
        let payloads: Vec<_> = claimed.jobs.iter().map(|j| j.payload.as_ref().map(|p| p.get())).collect();
        assert_eq!(payloads, [Some("null"), None, Some("{\"x\" : 1}")]);
        let ids: std::collections::BTreeSet<_> = claimed.jobs.iter().map(|j| j.id.as_str()).collect();
        assert_eq!(ids.len(), 3);
    }
}
