//! Sending: what waits goes together, and what the server could not take now is sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use serde_json::Value;
use tokio::sync::{Mutex, mpsc, watch};

use super::read::{Body, Item, Options};
use super::{Done, Problem};
use crate::cli::Outage;
use crate::cli::client::{Call, Client, Pause, Refused, Server, Trouble};
use crate::wire::json::Object;
use crate::wire::query;

/// Jobs and bytes of one call.
const BATCH: usize = 100;
const BATCH_BYTES: usize = 2 * 1024 * 1024;

pub struct Senders {
    server: Server,
    options: Options,
    patience: Duration,
    items: Mutex<mpsc::Receiver<Item>>,
    stopping: watch::Receiver<bool>,
    taken: AtomicU64,
}

/// Nobody listens any more, or the server was not to be reached.
struct Over;

impl Senders {
    pub fn new(
        server: Server,
        options: Options,
        patience: Duration,
        items: mpsc::Receiver<Item>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        Senders { server, options, patience, items: Mutex::new(items), stopping, taken: AtomicU64::new(0) }
    }

    pub fn start(self: &Arc<Self>, parallel: u8, done: mpsc::Sender<Done>) {
        for _ in 0..parallel {
            let sender = Sender {
                all: self.clone(),
                client: Client::new(self.server.clone()),
                done: done.clone(),
                outage: Outage::default(),
            };
            tokio::spawn(async move {
                // Said to whoever collects, unless that one is gone.
                let _ = sender.run().await;
            });
        }
    }

    /// Jobs that were sent or are being sent.
    pub fn taken(&self) -> u64 {
        self.taken.load(Relaxed)
    }

    /// What is there now, as far as one call carries it; a large one last. Empty: there is no more.
    async fn gather(&self) -> Vec<Item> {
        let mut items = self.items.lock().await;
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut next = items.recv().await;
        while let Some(item) = next {
            let is_last = match &item.body {
                Body::Json(json) => {
                    bytes += json.len();
                    bytes >= BATCH_BYTES
                }
                Body::Raw { .. } => true,
            };
            batch.push(item);
            if is_last || batch.len() >= BATCH {
                break;
            }
            next = items.try_recv().ok();
        }
        self.taken.fetch_add(batch.len() as u64, Relaxed);
        batch
    }
}

struct Sender {
    all: Arc<Senders>,
    client: Client,
    done: mpsc::Sender<Done>,
    outage: Outage,
}

impl Sender {
    async fn run(mut self) -> Result<(), Over> {
        let mut stopping = self.all.stopping.clone();
        loop {
            let mut batch = tokio::select! {
                biased;
                // Whoever could say so is gone: the same.
                _ = stopping.wait_for(|s| *s) => return Ok(()),
                batch = self.all.gather() => batch,
            };
            if batch.is_empty() {
                return Ok(());
            }
            let large = batch.pop_if(|item| matches!(item.body, Body::Raw { .. }));
            self.batch(batch).await?;
            if let Some(item) = large {
                self.raw(item).await?;
            }
        }
    }

    async fn tell(&self, name: String, id: Result<String, Problem>) -> Result<(), Over> {
        self.done.send(Done::Job { name, id }).await.map_err(|_| Over)
    }

    /// An answer or a refusal. Otherwise there is nothing left to do.
    async fn insist(&mut self, call: &Call) -> Result<Result<Value, Refused>, Over> {
        let outage = &mut self.outage;
        let tried = self.client.insist(call, Some(self.all.patience), &mut |t| outage.trouble(t)).await;
        match tried.and_then(|answer| answer.json()) {
            Ok(answer) => {
                self.outage.over();
                Ok(Ok(answer))
            }
            Err(Trouble::Refused(refused)) => Ok(Err(refused)),
            Err(trouble) => {
                self.give_up(trouble).await;
                Err(Over)
            }
        }
    }

    async fn give_up(&self, trouble: Trouble) {
        // Whoever collects may have ended already.
        let _ = self.done.send(Done::GaveUp(trouble)).await;
    }

    async fn batch(&mut self, items: Vec<Item>) -> Result<(), Over> {
        let mut parts = vec![items];
        while let Some(mut items) = parts.pop() {
            let mut pause = Pause::new();
            let begun = Instant::now();
            while !items.is_empty() {
                let call = Call::post("/v1/jobs:batch", body(&items));
                let answer = match self.insist(&call).await? {
                    Ok(answer) => answer,
                    Err(refused) if refused.status == StatusCode::PAYLOAD_TOO_LARGE && items.len() > 1 => {
                        // The server takes less at once.
                        parts.push(items.split_off(items.len() / 2));
                        continue;
                    }
                    Err(refused) => {
                        for item in items.drain(..) {
                            self.tell(item.name, Err(problem(&refused))).await?;
                        }
                        break;
                    }
                };
                let why;
                (items, why) = self.outcomes(items, &answer).await?;
                if let Some(refused) = why {
                    let trouble = Trouble::Later { refused, after: Duration::from_secs(1) };
                    if begun.elapsed() >= self.all.patience {
                        self.give_up(trouble).await;
                        return Err(Over);
                    }
                    pause.wait(&trouble).await;
                }
            }
        }
        Ok(())
    }

    /// Tells what became of each, and gives those that are to be sent again, and why if there are any.
    async fn outcomes(&self, items: Vec<Item>, answer: &Value) -> Result<(Vec<Item>, Option<Refused>), Over> {
        let mut results = answer["results"].as_array().into_iter().flatten();
        let (mut again, mut why) = (Vec::new(), None);
        for item in items {
            let result = results.next().unwrap_or(&Value::Null);
            match outcome(result) {
                Some(id) => self.tell(item.name, id).await?,
                None => {
                    why = why.or_else(|| Some(not_now(result)));
                    again.push(item);
                }
            }
        }
        Ok((again, why))
    }

    async fn raw(&mut self, item: Item) -> Result<(), Over> {
        let Body::Raw { payload, content_type } = item.body else { return Ok(()) };
        let options = &self.all.options;
        let mut path = format!("/v1/queues/{}/jobs", query::encode(&options.queue));
        let given = [
            ("class", options.class.clone()),
            ("delay_ms", options.delay_ms.map(|n| n.to_string())),
            ("max_attempts", options.max_attempts.map(|n| n.to_string())),
        ];
        let mut join = '?';
        for (name, value) in given {
            if let Some(value) = value {
                path.push_str(&format!("{join}{name}={}", query::encode(&value)));
                join = '&';
            }
        }
        let call = Call { content_type, key: Some(item.key), ..Call::post(path, payload) };
        let id = match self.insist(&call).await? {
            Ok(job) => job["id"].as_str().map(str::to_owned).ok_or_else(|| Problem {
                status: None,
                code: "unreadable".into(),
                detail: "the server's answer names no job".into(),
            }),
            Err(refused) => Err(problem(&refused)),
        };
        self.tell(item.name, id).await
    }
}

fn body(items: &[Item]) -> Vec<u8> {
    let jsons: Vec<&[u8]> = items
        .iter()
        .filter_map(|item| match &item.body {
            Body::Json(json) => Some(json.as_slice()),
            Body::Raw { .. } => None,
        })
        .collect();
    let mut out = Vec::with_capacity(16 + jsons.iter().map(|json| json.len() + 1).sum::<usize>());
    let mut object = Object::new(&mut out);
    crate::wire::json::array(object.key("jobs"), &jsons, |out, json| out.extend_from_slice(json));
    object.end();
    out
}

fn problem(refused: &Refused) -> Problem {
    let status = Some(u64::from(refused.status.as_u16()));
    Problem { status, code: refused.code.clone(), detail: refused.detail.clone() }
}

/// Why an item is to be sent again.
fn not_now(result: &Value) -> Refused {
    let text = |key: &str| result["problem"][key].as_str().map(str::to_owned);
    let status = result["status"].as_u64().and_then(|s| StatusCode::from_u16(u16::try_from(s).ok()?).ok());
    Refused {
        status: status.unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
        code: text("code").unwrap_or_else(|| "outcome_unknown".into()),
        detail: text("detail").unwrap_or_else(|| "The server's answer does not say what became of the job.".into()),
    }
}

/// The job's id, or why there is none; `None`: later.
fn outcome(result: &Value) -> Option<Result<String, Problem>> {
    match result["status"].as_u64() {
        Some(200 | 201) => Some(Ok(result["job"]["id"].as_str()?.to_owned())),
        Some(429 | 503) | None => None,
        status => {
            let text = |key: &str| result["problem"][key].as_str().unwrap_or_default().to_owned();
            let field = result["problem"]["field"].as_str().map(|f| format!("{f}: ")).unwrap_or_default();
            Some(Err(Problem { status, code: text("code"), detail: format!("{field}{}", text("detail")) }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_item_is_done_refused_or_tried_again() {
        assert_eq!(outcome(&json!({"status": 201, "job": {"id": "x"}})), Some(Ok("x".into())));
        assert_eq!(outcome(&json!({"status": 503, "problem": {}})), None);
        assert_eq!(outcome(&Value::Null), None);
        assert_eq!(not_now(&Value::Null).code, "outcome_unknown");
        let full = not_now(&json!({"status": 503, "problem": {"code": "store_full", "detail": "d"}}));
        assert_eq!(full.to_string(), "503 store_full: d");
        let refused =
            outcome(&json!({"status": 422, "problem": {"code": "invalid_field", "field": "f", "detail": "d"}}));
        let problem = Problem { status: Some(422), code: "invalid_field".into(), detail: "f: d".into() };
        assert_eq!(problem.text(), "422 invalid_field: f: d");
        assert_eq!(refused, Some(Err(problem)));
    }
}
