//! One job: its upstream is called while its lease is renewed, and what came of it is told until that is answered.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::response::Parts;
use hyper::{HeaderMap, Method, Request};
use leasehold_core::opaque::Content;
use leasehold_core::request::{Beat, Complete, Dispatched, Fail, GiveBack, Held, HoldUpstream};
use leasehold_core::{Failure, Outcome, Request as Asked, Response as Answer};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Work;
use super::verdict::{self, HEAD_BYTES, Meaning, Verdict};
use crate::body::Body;
use crate::proxy::headers::configured;
use crate::request_id::X_REQUEST_ID;
use crate::upstream::Upstream;
use crate::upstream::call::{self, Rest};
use crate::upstream::connect::FAREWELL;
use crate::upstream::slot::Token;

/// Between two tries to tell what became of a job, first and longest.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// A request is answered within this.
const ANSWERED: Duration = Duration::from_millis(leasehold_core::limits::REQUEST_MS);
/// Longest between two heartbeats: by the next one a call stops whose job was cancelled, and its slots come back.
const BEAT_MAX: Duration = Duration::from_secs(1);
/// A call whose time is up stops so long before: then its upstream has hung up when its slots are another's.
const EARLY: Duration = Duration::from_millis(100);
/// Tries to hear that an attempt is over whose time is up.
const TRIES: u32 = 20;

static CLASS: HeaderName = HeaderName::from_static("leasehold-class");
static JOB: HeaderName = HeaderName::from_static("leasehold-job-id");
static TOKEN: HeaderName = HeaderName::from_static("leasehold-token");
static ATTEMPT: HeaderName = HeaderName::from_static("leasehold-attempt");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Runs a job in a task of its own.
pub fn start(work: Arc<Work>, job: Dispatched) {
    let alive = work.gateway.alive();
    tokio::spawn(async move {
        Run::of(&work, job).go().await;
        drop(alive);
    });
}

struct Run<'a> {
    work: &'a Work,
    /// When it was handed out, or a little later.
    began: Instant,
    upstream: Option<Arc<Upstream>>,
    held: Held,
    lease: Duration,
    job: Dispatched,
}

/// Why a lease is no longer renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// There is nothing to be told any more: the job is cancelled, or is another's.
    Gone,
    /// The attempt has had its time.
    TimeUp,
    /// The slots may be another's: the job goes back.
    SlotsLost,
}

impl<'a> Run<'a> {
    fn of(work: &'a Work, job: Dispatched) -> Run<'a> {
        let upstream = work.gateway.upstreams.iter().find(|u| u.name() == job.placed.upstream).cloned();
        let held = Held { tenant: job.tenant.clone(), job: job.job.id, token: Some(job.job.token) };
        // Both by the store's clock, in microseconds.
        let lease = Duration::from_micros(job.job.lease_expires_at.saturating_sub(job.job.token.at));
        Run { work, began: Instant::now(), upstream, held, lease, job }
    }

    async fn go(self) {
        let (token, hung_up) = oneshot::channel();
        let mut beats = pin!(self.beat());
        let called = tokio::select! {
            verdict = self.call(Arc::new(token)) => Ok(verdict),
            stop = &mut beats => Err(stop),
            () = self.work.gateway.ended() => Ok(Verdict::Release),
        };
        // A call that was given up is over when its upstream has hung up too.
        let _ = timeout(FAREWELL, hung_up).await;
        let verdict = match called {
            Ok(verdict) => verdict,
            Err(Stop::Gone) => return self.give_back().await,
            Err(Stop::TimeUp) => return self.time_up().await,
            Err(Stop::SlotsLost) => return self.tell(Verdict::Release).await,
        };
        // The lease is renewed until this is answered: what is finished is not lost because the store was away. If
        // it is lost all the same, the answer says so.
        let mut told = pin!(self.tell(verdict));
        tokio::select! {
            () = &mut told => {}
            _ = &mut beats => told.await,
        }
    }

    /// Calls the upstream and reads its answer.
    async fn call(&self, token: Token) -> Verdict {
        let Some(upstream) = self.upstream.as_ref().filter(|u| u.settings.on_prem || !self.job.on_prem) else {
            return Verdict::Release;
        };
        if upstream.admit(std::time::Instant::now()).is_err() {
            return Verdict::Release;
        }
        let payload = match &self.job.job.payload {
            Some(content) => content.clone(),
            None => match self.payload().await {
                Ok(content) => content,
                Err(_) => return Verdict::Release,
            },
        };
        let Some(request) = self.request(upstream, payload) else {
            return verdict::failed("the job cannot be sent as it is", "not_sendable", false);
        };
        match call::send(upstream, request, Some(token)).await {
            Ok(call::Answer { head, rest }) => self.answered(upstream, head, rest).await,
            Err(unanswered) => verdict::of_trouble(unanswered.trouble),
        }
    }

    async fn payload(&self) -> Result<Content, Failure> {
        let asked = || Asked::Payload { tenant: self.job.tenant.clone(), job: self.job.job.id };
        match self.until_answered(asked).await {
            Ok(Answer::Content(content)) => Ok(content),
            Ok(_) => Err(Failure::NoPayload),
            Err(failure) => Err(failure),
        }
    }

    fn request(&self, upstream: &Upstream, payload: Content) -> Option<Request<Body>> {
        let (settings, job) = (&upstream.settings, &self.job.job);
        let mut headers = HeaderMap::new();
        let mut set = |name: &HeaderName, value: &str| {
            HeaderValue::from_str(value).ok().map(|value| headers.insert(name.clone(), value))
        };
        set(&CONTENT_TYPE, payload.content_type())?;
        set(&CLASS, job.class.text())?;
        set(&JOB, &job.id.to_string())?;
        set(&X_REQUEST_ID, &job.id.to_string())?;
        set(&TOKEN, &job.token.text(job.id))?;
        set(&ATTEMPT, &job.attempt.to_string())?;
        if let Some(trace) = &job.traceparent {
            set(&TRACEPARENT, trace)?;
        }
        configured(&mut headers, settings)?;
        let mut request = Request::new(Body::full(payload.data.bytes));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = format!("{}{}", settings.base.prefix, settings.path).parse().ok()?;
        *request.headers_mut() = headers;
        Some(request)
    }

    async fn answered(&self, upstream: &Arc<Upstream>, head: Parts, mut rest: Rest) -> Verdict {
        let meaning = verdict::meaning(&head);
        if let Meaning::Pause(pause) = meaning {
            return Verdict::Pause(pause);
        }
        if self.job.placed.probe {
            // It takes calls again. If this is not heard, the next call tells.
            let _ = self.work.driver.ask(Asked::FreeUpstream { upstream: upstream.name().to_owned() }).await;
        }
        let most = match meaning {
            Meaning::Success => usize::try_from(self.work.max_result).unwrap_or(usize::MAX),
            Meaning::Pause(_) | Meaning::Failure { .. } => HEAD_BYTES,
        };
        let mut body = BytesMut::new();
        loop {
            match rest.next().await {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) => break,
                Err(trouble) => return verdict::of_trouble(trouble),
            }
            if body.len() > most {
                if meaning == Meaning::Success {
                    return verdict::failed("the upstream's answer is larger than max_body", "result_too_large", false);
                }
                break;
            }
        }
        match meaning {
            Meaning::Failure { retryable } => verdict::told(&head, &body, retryable),
            Meaning::Success | Meaning::Pause(_) => Verdict::Complete(verdict::result(&head, body.freeze())),
        }
    }

    /// Renews lease and slots, and returns when the call must stop.
    async fn beat(&self) -> Stop {
        // The grant came some time before its answer.
        let mut until = self.began + self.lease - ANSWERED.min(self.lease / 2);
        let mut most: Option<Instant> = None;
        let pace = (self.lease / 3).min(BEAT_MAX);
        let mut next = Instant::now() + pace;
        loop {
            tokio::select! {
                () = sleep_until(next.min(until)) => {}
                () = until_some(most) => return Stop::TimeUp,
            }
            let sent = Instant::now();
            let beat = Asked::Heartbeat(Beat { held: self.held.clone(), progress: None, seq: None });
            let outcome = tokio::select! {
                outcome = self.work.driver.ask(beat) => outcome,
                // slot-not-resurrected: from here on the slots may be somebody else's.
                () = sleep_until(until) => return Stop::SlotsLost,
                () = until_some(most) => return Stop::TimeUp,
            };
            match outcome {
                Ok(Answer::Beat { cancel_requested: true, .. }) => return Stop::Gone,
                Ok(answer) => {
                    until = sent + self.lease;
                    next = sent + pace;
                    if let Answer::Beat { lease_expires_at: Some(at), .. } = answer {
                        // It ends before it would: with the attempt's own time.
                        let end = self.began + Duration::from_micros(at.saturating_sub(self.job.job.token.at));
                        most = Some(end.checked_sub(EARLY).unwrap_or(end)).filter(|end| *end + 2 * EARLY < until);
                    }
                }
                Err(Failure::SlotLost) => return Stop::SlotsLost,
                Err(failure) if is_final(&failure) => return Stop::Gone,
                Err(_) => next = Instant::now() + (self.lease / 6).min(Duration::from_secs(1)),
            }
        }
    }

    /// Waits until it is heard that the attempt is over: whoever notices first says that its time was up.
    async fn time_up(&self) {
        for _ in 0..TRIES {
            let beat = Asked::Heartbeat(Beat { held: self.held.clone(), progress: None, seq: None });
            match self.work.driver.ask(beat).await {
                Ok(Answer::Beat { cancel_requested: true, .. }) => return self.give_back().await,
                Err(failure) if is_final(&failure) => return,
                _ => sleep(AGAIN).await,
            }
        }
        self.tell(Verdict::Release).await;
    }

    /// The call of a job that was cancelled is over: its slots are free for others.
    async fn give_back(&self) {
        let job = &self.job.job;
        let (class, placed) = (job.class, self.job.placed.clone());
        let asked = || Asked::GiveBack(GiveBack { job: job.id, token: job.token, class, placed: placed.clone() });
        if let Err(failure) = self.until_answered(asked).await {
            tracing::debug!(job = %job.id, code = failure.code(), "slots of a cancelled job were not given back");
        }
    }

    /// Tells what became of the job, until that is answered.
    async fn tell(&self, verdict: Verdict) {
        let held = || self.held.clone();
        let release = || Asked::Release(held());
        let outcome = match verdict {
            Verdict::Complete(result) => {
                let complete = || Asked::Complete(Box::new(Complete { held: held(), result: result.clone() }));
                self.until_answered(complete).await
            }
            Verdict::Fail { error, retryable } => {
                let error = || error.clone();
                let fail = || Fail { held: held(), error: error(), retryable, retry_in_ms: None };
                self.until_answered(|| Asked::Fail(Box::new(fail()))).await
            }
            Verdict::Pause(pause) => {
                let for_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
                let for_ms = for_ms.clamp(1, leasehold_core::limits::HOLD_MS_MAX);
                let upstream = self.job.placed.upstream.clone();
                let hold = || Asked::HoldUpstream(HoldUpstream { upstream: upstream.clone(), for_ms });
                // First the hold, so that the job is not sent there again meanwhile.
                let _ = self.until_answered(hold).await;
                self.until_answered(release).await
            }
            Verdict::Release => self.until_answered(release).await,
        };
        if let Err(failure) = outcome {
            // Cancelled, or another's by now: whoever has it tells what becomes of it.
            tracing::debug!(job = %self.job.job.id, code = failure.code(), "a job's end was not taken");
            self.give_back().await;
        }
    }

    async fn until_answered(&self, request: impl Fn() -> Asked) -> Outcome {
        let mut pause = AGAIN;
        loop {
            let outcome = self.work.driver.ask(request()).await;
            match &outcome {
                Err(failure) if !is_final(failure) => {}
                _ => return outcome,
            }
            sleep(pause).await;
            pause = (pause * 2).min(AGAIN_MAX);
        }
    }
}

async fn until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Whether repeating a request would be answered the same.
fn is_final(failure: &Failure) -> bool {
    failure.retry_after_ms().is_none()
}
