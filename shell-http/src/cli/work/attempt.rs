//! One job under one lease: from its payload to the answer to its completion.

use std::io;
use std::pin::pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use base64::Engine as _;
use bytes::Bytes;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::command::{self, RESULT, Said};
use super::lease::{Beat, Lease, is_gone};
use super::{FAREWELL, Leased, Shared, Stop, Work};
use crate::cli::client::{Call, Client, Pause, Refused, Trouble};
use crate::cli::terminal::printable;
use crate::cli::{Outage, print_line};
use crate::wire::json::Object;

pub struct Attempt {
    pub work: Arc<Work>,
    pub job: Leased,
    pub shared: Shared,
    /// The claim was repeated: the lease may have been given long ago.
    pub is_old: bool,
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
    /// This worker was told to end.
    Stopped,
    /// The command cannot be started at all.
    Broken(String),
}

/// What became of the attempt.
enum Outcome {
    Succeeded,
    Failed(String),
    Released,
    Lost(String),
}

type News = watch::Receiver<Option<String>>;

impl Attempt {
    pub async fn run(self) {
        let begun = Instant::now();
        let mut client = Client::new(self.work.to.server.clone());
        if self.is_old
            && let Some(outcome) = self.renew(&mut client).await
        {
            return self.report(outcome, begun.elapsed());
        }
        let (taken, mut news) = watch::channel(None::<String>);
        let beats = tokio::spawn(self.lease().keep(self.shared.failing.clone(), taken));
        let outcome = match self.execute(&mut client, &mut news).await {
            Ran::Taken(why) => Outcome::Lost(why),
            Ran::Stopped => self.release(&mut client).await,
            Ran::Broken(why) => {
                // One message is enough: the first.
                let _ = self.shared.broken.try_send(why);
                self.release(&mut client).await
            }
            Ran::Result(result) => self.complete(&mut client, result, &mut news).await,
            Ran::Failed { message, kind, retryable } => {
                self.fail(&mut client, &message, &kind, retryable, &mut news).await
            }
        };
        beats.abort();
        self.report(outcome, begun.elapsed());
    }

    /// Given back without having begun.
    pub async fn never_began(self, client: &mut Client) {
        let outcome = self.release(client).await;
        self.report(outcome, Duration::ZERO);
    }

    fn lease(&self) -> Lease {
        Lease {
            server: self.work.to.server.clone(),
            id: self.job.id.clone(),
            token: self.job.token.clone(),
            length: Duration::from_millis(self.work.lease_ms),
        }
    }

    /// Makes sure of a lease that may be old, before anything is begun under it.
    async fn renew(&self, client: &mut Client) -> Option<Outcome> {
        let lease = self.lease();
        let mut pause = Pause::new();
        let mut stopping = self.shared.stopping.clone();
        loop {
            match lease.renew(client).await {
                Beat::Renewed => return None,
                Beat::Taken(why) => return Some(Outcome::Lost(why)),
                Beat::Unanswered(trouble) => tokio::select! {
                    () = pause.wait(&trouble) => {}
                    () = told(&mut stopping, Stop::Beginning) => return Some(self.release(client).await),
                },
            }
        }
    }

    fn report(&self, outcome: Outcome, took: Duration) {
        let tally = &self.shared.tally;
        let (name, count, why) = match &outcome {
            Outcome::Succeeded => ("succeeded", &tally.succeeded, None),
            Outcome::Failed(why) => ("failed", &tally.failed, Some(why)),
            Outcome::Released => ("released", &tally.released, None),
            Outcome::Lost(why) => ("lost", &tally.lost, Some(why)),
        };
        count.fetch_add(1, Relaxed);
        let Leased { id, queue, attempt, .. } = &self.job;
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        if self.work.json {
            let mut line = json!({"id": id, "queue": queue, "attempt": attempt, "outcome": name, "ms": ms});
            if let Some(why) = why {
                line["why"] = why.as_str().into();
            }
            // Whoever read it may have gone; the work goes on.
            let _ = print_line(&line.to_string());
        }
        if self.work.verbose || matches!(outcome, Outcome::Lost(_)) {
            let why = why.map(|why| format!(": {}", printable(why))).unwrap_or_default();
            say!("job {} {name} after {ms} ms{why}", printable(id));
        }
    }

    /// Runs the command, unless the job is taken away before it is through.
    async fn execute(&self, client: &mut Client, news: &mut News) -> Ran {
        let mut stopping = self.shared.stopping.clone();
        let payload = tokio::select! {
            biased;
            // Nothing is begun any more.
            () = told(&mut stopping, Stop::Beginning) => return Ran::Stopped,
            why = taken_away(news) => return Ran::Taken(why),
            payload = self.payload(client) => payload,
        };
        let payload = match payload {
            Ok(payload) => payload,
            Err(trouble) => return Ran::Taken(trouble.to_string()),
        };
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                let program = self.work.command.first().map(String::as_str).unwrap_or_default();
                return match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                        Ran::Broken(format!("{program} cannot be started: {error}"))
                    }
                    _ => failed(format!("the command could not be started: {error}"), "spawn"),
                };
            }
        };
        let group = child.id();
        let mut said = Said::default();
        let ended = {
            let mut talk = pin!(command::talk(&mut child, payload, &mut said));
            let why = tokio::select! {
                ended = talk.as_mut() => Ok(ended),
                why = taken_away(news) => Err(Ran::Taken(why)),
                () = told(&mut stopping, Stop::Everything) => Err(Ran::Stopped),
                limit = over(self.work.timeout) => {
                    Err(failed(format!("the command ran for longer than {limit:?}"), "timeout"))
                }
            };
            if !matches!(why, Ok(Ok(_))) {
                // Its output is still read: a command that cleans up must not die of a closed pipe.
                let through = async {
                    // Nobody wants the result any more.
                    let _ = talk.await;
                };
                // Of a command that could not be read, nothing is waited for.
                match &why {
                    Ok(_) => command::end(group, std::future::ready(())).await,
                    Err(_) => command::end(group, through).await,
                }
            }
            why
        };
        match ended {
            Ok(Ok(status)) => self.judge(status, said),
            Ok(Err(error)) => failed(format!("the command's output could not be read: {error}"), "io"),
            Err(Ran::Failed { message, kind, retryable }) => {
                let tail = command::text(&said.tail);
                let message = if tail.is_empty() { message } else { format!("{message}\n{tail}") };
                Ran::Failed { message, kind, retryable }
            }
            Err(why) => why,
        }
    }

    /// The payload's bytes: with the lease, or fetched if it was too large for that.
    async fn payload(&self, client: &mut Client) -> Result<Bytes, Trouble> {
        if let Some(json) = &self.job.payload {
            return Ok(Bytes::copy_from_slice(json.get().as_bytes()));
        }
        let decoded = self.job.payload_base64.as_ref().map(|t| base64::engine::general_purpose::STANDARD.decode(t));
        if let Some(Ok(bytes)) = decoded {
            return Ok(bytes.into());
        }
        let call = Call::get(format!("/v1/jobs/{}/payload", self.job.id));
        Ok(client.insist(&call, None, &mut |_| {}).await?.body)
    }

    fn spawn(&self) -> io::Result<tokio::process::Child> {
        let job = &self.job;
        let (attempt, delivery) = (job.attempt.to_string(), job.delivery.to_string());
        let server = self.work.to.server.to_string();
        let content_type = match (&job.payload, &job.content_type) {
            (Some(_), _) => Some("application/json"),
            (None, given) => given.as_deref(),
        };
        command::spawn(
            &self.work.command,
            &[
                ("LEASEHOLD_JOB_ID", Some(&job.id)),
                ("LEASEHOLD_QUEUE", Some(&job.queue)),
                ("LEASEHOLD_ATTEMPT", Some(&attempt)),
                ("LEASEHOLD_DELIVERY", Some(&delivery)),
                ("LEASEHOLD_TOKEN", Some(&job.token)),
                ("LEASEHOLD_CONTENT_TYPE", content_type),
                ("LEASEHOLD_SERVER", Some(&server)),
                ("TRACEPARENT", job.traceparent.as_deref()),
            ],
        )
    }

    fn judge(&self, status: ExitStatus, said: Said) -> Ran {
        let Said { output, tail, too_long } = said;
        if !status.success() {
            let kind = match (status.code(), std::os::unix::process::ExitStatusExt::signal(&status)) {
                (Some(code), _) => format!("exit_{code}"),
                (None, Some(signal)) => format!("signal_{signal}"),
                (None, None) => "exit".into(),
            };
            let tail = command::text(&tail);
            let message = if tail.is_empty() { format!("the command ended with {status}") } else { tail };
            let code = status.code().and_then(|c| u8::try_from(c).ok());
            let retryable = code.is_none_or(|code| !self.work.not_retryable.contains(&code));
            return Ran::Failed { message, kind, retryable };
        }
        if too_long {
            let message = format!("the result is larger than {RESULT} bytes");
            return Ran::Failed { message, kind: "result_too_large".into(), retryable: false };
        }
        if self.is_json() && serde_json::from_slice::<&RawValue>(&output).is_err() {
            return failed("the command's output is not JSON".into(), "result_not_json");
        }
        Ran::Result(output)
    }

    fn is_json(&self) -> bool {
        self.work.content_type.as_deref() == Some("application/json")
    }

    async fn complete(&self, client: &mut Client, result: Vec<u8>, news: &mut News) -> Outcome {
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
        match self.tell(client, "complete", out, news).await {
            Ok(()) => Outcome::Succeeded,
            // The job must not go round and round with a result that is never taken.
            Err(Told::Refused(refused)) if !is_gone(&refused) => {
                let message = format!("the result was refused: {refused}");
                self.fail(client, &message, "result_refused", false, news).await
            }
            Err(told) => Outcome::Lost(told.text()),
        }
    }

    async fn fail(&self, client: &mut Client, message: &str, kind: &str, retryable: bool, news: &mut News) -> Outcome {
        let error = json!({"message": message, "type": kind});
        let body = json!({"token": self.job.token, "error": error, "retryable": retryable});
        match self.tell(client, "fail", body.to_string().into_bytes(), news).await {
            Ok(()) => Outcome::Failed(message.to_owned()),
            Err(told) => Outcome::Lost(told.text()),
        }
    }

    /// Gives the job back. Best effort: otherwise the lease lapses.
    async fn release(&self, client: &mut Client) -> Outcome {
        let body = json!({"token": self.job.token}).to_string();
        let call = Call::post(format!("/v1/jobs/{}/release", self.job.id), body);
        match tokio::time::timeout(FAREWELL, client.insist(&call, None, &mut |_| {})).await {
            Ok(Ok(_)) => Outcome::Released,
            Ok(Err(trouble)) => Outcome::Lost(trouble.to_string()),
            Err(_) => Outcome::Lost("could not be given back in time: its lease will lapse".into()),
        }
    }

    /// Repeats a call until the server has answered it, or has said that the job is not ours.
    async fn tell(&self, client: &mut Client, what: &str, body: Vec<u8>, news: &mut News) -> Result<(), Told> {
        let call = Call::post(format!("/v1/jobs/{}/{what}", self.job.id), body);
        let mut outage = Outage::default();
        let mut pause = Pause::new();
        let mut stopping = self.shared.stopping.clone();
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
                why = taken_away(news) => return Err(Told::Taken(why)),
                () = told(&mut stopping, Stop::Everything) => {
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

fn failed(message: String, kind: &str) -> Ran {
    Ran::Failed { message, kind: kind.into(), retryable: true }
}

async fn taken_away(news: &mut News) -> String {
    let why = news.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
    match why {
        Some(why) => why,
        // The heartbeats ended without such news: none will come.
        None => std::future::pending().await,
    }
}

/// Waits until this worker is told to end, at least so far.
async fn told(stopping: &mut watch::Receiver<Stop>, far: Stop) {
    if stopping.wait_for(|s| *s >= far).await.is_err() {
        std::future::pending().await
    }
}

/// Waits for as long as the limit is, if there is one.
async fn over(limit: Option<Duration>) -> Duration {
    match limit {
        Some(limit) => {
            tokio::time::sleep(limit).await;
            limit
        }
        None => std::future::pending().await,
    }
}
