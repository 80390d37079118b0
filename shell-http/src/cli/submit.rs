//! `leasehold submit`: files and lines as jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use clap::Args;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

use super::client::{Call, Client, Pause, Trouble, unique};
use super::{Failed, Outage, To, print_line, printable};
use crate::wire::json::Object;
use crate::wire::query;

/// Jobs and bytes of one call.
const BATCH: usize = 100;
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Idempotency keys, bytes.
const KEY_BYTES: usize = leasehold_core::limits::KEY_BYTES;
/// Jobs that are looked at in one round of waiting, oldest first.
const WINDOW: usize = 64;
const ROUND_MIN: Duration = Duration::from_millis(100);
const ROUND_MAX: Duration = Duration::from_secs(2);

/// Submit jobs: one for each file, or one for each line of standard input
#[derive(Args, Debug)]
#[command(after_help = "\
A .json file is sent as JSON, any other as its bytes with a content type guessed from its name. A line
that is a JSON object or list is sent as JSON, any other as text/plain.

Every job gets an idempotency key, so that nothing is submitted twice when the server has to be asked
again. With --key-prefix the keys stay the same from run to run: a second run submits only what is new.

Examples:
  leasehold submit --queue docs --key-prefix import-7 docs/*.txt
  seq 100 | leasehold submit --queue numbers -
  leasehold submit --queue docs --wait --results out docs/*.txt

Exit codes: 0 all submitted (with --wait: all succeeded), 1 not all, 2 wrong usage.")]
pub struct Submit {
    #[command(flatten)]
    to: To,
    /// The queue
    #[arg(long)]
    queue: String,
    /// Files; `-` is standard input, a job a line
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Keys are PREFIX/NAME of the file, or PREFIX/NUMBER of the line
    #[arg(long, value_name = "PREFIX")]
    key_prefix: Option<String>,
    /// interactive, system or batch
    #[arg(long)]
    class: Option<String>,
    /// Not before so many milliseconds from now
    #[arg(long, value_name = "MS")]
    delay_ms: Option<u64>,
    /// Attempts before the job is dead
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// Content type of the files, instead of guessing it
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Wait until every job has ended
    #[arg(long)]
    wait: bool,
    /// Write results to DIR/NAME.out
    #[arg(long, value_name = "DIR", requires = "wait")]
    results: Option<PathBuf>,
    /// Calls at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// Print a JSON object for each job
    #[arg(long)]
    json: bool,
}

/// A job on its way.
#[derive(Debug)]
struct Item {
    /// The file's name or the line's number.
    name: String,
    json: Vec<u8>,
}

#[derive(Debug)]
struct Submitted {
    name: String,
    id: Result<String, String>,
}

impl Submit {
    pub async fn run(self) -> Result<(), Failed> {
        self.check_names()?;
        if let Some(dir) = &self.results {
            std::fs::create_dir_all(dir).map_err(|e| Failed::Because(format!("{}: {e}", dir.display())))?;
        }
        let (batches, receiver) = mpsc::channel::<Vec<Item>>(usize::from(self.parallel));
        let (done, mut all_done) = mpsc::channel::<Submitted>(BATCH * 4);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..self.parallel {
            let client = Client::new(self.to.server.clone());
            tokio::spawn(send_batches(client, receiver.clone(), done.clone()));
        }
        drop(done);
        let collect = async {
            let mut jobs = Vec::new();
            let mut failed = 0usize;
            let mut progress = Progress::new("submitted");
            while let Some(Submitted { name, id }) = all_done.recv().await {
                match id {
                    Ok(id) => {
                        if !self.wait {
                            self.print(&name, &id, "submitted")?;
                        }
                        jobs.push((name, id));
                        progress.count();
                    }
                    Err(why) => {
                        progress.clear();
                        eprintln!("leasehold: {}: {}", printable(&name), printable(&why));
                        failed += 1;
                    }
                }
            }
            progress.end();
            Ok::<_, Failed>((jobs, failed))
        };
        let (read, collected) = tokio::join!(self.read(batches), collect);
        let (jobs, mut failed) = collected?;
        let read_failed = read?;
        failed += read_failed;
        if self.wait {
            failed += self.wait_for(jobs).await?;
        }
        if failed > 0 {
            return Err(Failed::Because(format!("{failed} of the jobs did not make it")));
        }
        Ok(())
    }

    fn print(&self, name: &str, id: &str, status: &str) -> Result<(), Failed> {
        if self.json {
            print_line(&json!({"id": id, "name": name, "status": status}).to_string())
        } else if self.wait {
            print_line(&format!("{id}\t{}\t{status}", printable(name)))
        } else {
            print_line(&format!("{id}\t{}", printable(name)))
        }
    }

    /// Two results must not go to one file, nor two jobs have one key.
    fn check_names(&self) -> Result<(), Failed> {
        let mut paths = BTreeSet::new();
        let mut names = BTreeMap::new();
        for path in &self.files {
            if !paths.insert(path) {
                return Err(Failed::Because(format!("{} is given twice", path.display())));
            }
            if let (Some(_), Some(earlier)) = (&self.results, names.insert(file_name(path), path)) {
                let (a, b) = (earlier.display(), path.display());
                return Err(Failed::Because(format!("the results of {a} and {b} would go to the same file")));
            }
        }
        Ok(())
    }

    /// Reads files and lines into batches. Returns how many could not be read.
    async fn read(&self, batches: mpsc::Sender<Vec<Item>>) -> Result<usize, Failed> {
        let prefix = self.key_prefix.clone().unwrap_or_else(unique);
        let mut pending = Pending { batches, items: Vec::new(), bytes: 0 };
        let mut failed = 0;
        for path in &self.files {
            if path.as_os_str() == "-" {
                for (n, line) in std::io::stdin().lock().lines().enumerate() {
                    let line = line?;
                    let name = format!("line-{}", n + 1);
                    let text = line.trim();
                    let as_json = text.starts_with(['{', '[']) && serde_json::from_str::<&RawValue>(text).is_ok();
                    let kind = if as_json { None } else { Some("text/plain; charset=utf-8") };
                    let key = format!("{prefix}/{}", n + 1);
                    let json = self.job(if as_json { text.as_bytes() } else { line.as_bytes() }, kind, &key);
                    pending.add(Item { name, json }).await?;
                }
                continue;
            }
            match self.file(path, &prefix) {
                Ok(item) => pending.add(item).await?,
                Err(why) => {
                    eprintln!("leasehold: {}: {why}", path.display());
                    failed += 1;
                }
            }
        }
        pending.flush().await?;
        Ok(failed)
    }

    fn file(&self, path: &Path, prefix: &str) -> Result<Item, String> {
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        let kind = self.content_type.as_deref().unwrap_or_else(|| guess(path));
        let kind = if kind == "application/json" {
            serde_json::from_slice::<&RawValue>(&bytes).map_err(|e| format!("is not JSON: {e}"))?;
            None
        } else {
            Some(kind)
        };
        let key = key(prefix, &path.to_string_lossy());
        Ok(Item { name: path.to_string_lossy().into_owned(), json: self.job(&bytes, kind, &key) })
    }

    /// The job as JSON; without a content type the payload is JSON.
    fn job(&self, payload: &[u8], content_type: Option<&str>, key: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + payload.len().div_ceil(3) * 4);
        let mut object = Object::new(&mut out);
        object.str("queue", &self.queue);
        object.str("idempotency_key", key);
        match content_type {
            None => object.text("payload", payload),
            Some(kind) => {
                object.str("payload_base64", &base64::engine::general_purpose::STANDARD.encode(payload));
                object.str("content_type", kind);
            }
        }
        if let Some(class) = &self.class {
            object.str("class", class);
        }
        if let Some(delay) = self.delay_ms {
            object.num("delay_ms", delay);
        }
        if let Some(max) = self.max_attempts {
            object.num("max_attempts", max.into());
        }
        object.end();
        out
    }

    /// Waits for every job, oldest first, and fetches results. Returns how many did not succeed.
    async fn wait_for(&self, jobs: Vec<(String, String)>) -> Result<usize, Failed> {
        let mut client = Client::new(self.to.server.clone());
        let mut outage = Outage::default();
        let mut progress = Progress::new("ended");
        let mut failed = 0;
        let mut round = ROUND_MIN;
        let mut left: std::collections::VecDeque<_> = jobs.into();
        while !left.is_empty() {
            let mut moved = false;
            for _ in 0..left.len().min(WINDOW) {
                let Some((name, id)) = left.pop_front() else { break };
                let call = Call::get(format!("/v1/jobs/{id}"));
                let answer = client.insist(&call, &mut |t| outage.trouble(t)).await;
                outage.over();
                let job = match answer {
                    Ok(answer) => answer.json()?,
                    Err(refused) => json!({"status": "gone", "reason": refused.to_string()}),
                };
                let status = job["status"].as_str().unwrap_or_default();
                match status {
                    "succeeded" => self.result(&mut client, &name, &id).await?,
                    "dead" | "cancelled" | "expired" | "gone" => {
                        failed += 1;
                        progress.clear();
                        let why = job["attempts"].as_array().and_then(|a| a.last()?["error"]["message"].as_str());
                        let why = why.or(job["reason"].as_str()).unwrap_or_default();
                        eprintln!("leasehold: {}: {status} {}", printable(&name), printable(why));
                    }
                    _ => {
                        left.push_back((name, id));
                        continue;
                    }
                }
                moved = true;
                progress.count();
                self.print(&name, &id, status)?;
            }
            round = if moved { ROUND_MIN } else { (round * 2).min(ROUND_MAX) };
            if !moved {
                tokio::time::sleep(round).await;
            }
        }
        progress.end();
        Ok(failed)
    }

    async fn result(&self, client: &mut Client, name: &str, id: &str) -> Result<(), Failed> {
        let Some(dir) = &self.results else { return Ok(()) };
        let call = Call::get(format!("/v1/jobs/{}/result", query::encode(id)));
        let answer = client.insist(&call, &mut |_| {}).await?;
        let path = dir.join(format!("{}.out", file_name(Path::new(name))));
        // Renamed into place: whoever sees the file sees all of it.
        let part = dir.join(format!(".{}.part", file_name(Path::new(name))));
        let written = std::fs::write(&part, &answer.body).and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|e| Failed::Because(format!("{}: {e}", path.display())))
    }
}

struct Pending {
    batches: mpsc::Sender<Vec<Item>>,
    items: Vec<Item>,
    bytes: usize,
}

impl Pending {
    async fn add(&mut self, item: Item) -> Result<(), Failed> {
        if self.items.len() >= BATCH || (self.bytes + item.json.len() > BATCH_BYTES && !self.items.is_empty()) {
            self.flush().await?;
        }
        self.bytes += item.json.len();
        self.items.push(item);
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Failed> {
        self.bytes = 0;
        let items = std::mem::take(&mut self.items);
        if items.is_empty() {
            return Ok(());
        }
        self.batches.send(items).await.map_err(|_| Failed::Quietly)
    }
}

/// Sends batches until there are none. Items that the server could not take now are sent again.
async fn send_batches(
    mut client: Client,
    batches: Arc<Mutex<mpsc::Receiver<Vec<Item>>>>,
    done: mpsc::Sender<Submitted>,
) {
    let mut outage = Outage::default();
    loop {
        let batch = batches.lock().await.recv().await;
        let Some(mut items) = batch else { return };
        let mut pause = Pause::new();
        while !items.is_empty() {
            let call = Call::post("/v1/jobs:batch", body(&items));
            let answer = match client.insist(&call, &mut |t| outage.trouble(t)).await {
                Ok(answer) => answer.json().unwrap_or_default(),
                Err(refused) => {
                    for item in items.drain(..) {
                        let submitted = Submitted { name: item.name, id: Err(refused.to_string()) };
                        if done.send(submitted).await.is_err() {
                            return;
                        }
                    }
                    break;
                }
            };
            outage.over();
            let mut again = Vec::new();
            let mut results = answer["results"].as_array().cloned().unwrap_or_default().into_iter();
            for item in items.drain(..) {
                let id = match outcome(&results.next().unwrap_or_default()) {
                    Some(id) => id,
                    None => {
                        again.push(item);
                        continue;
                    }
                };
                if done.send(Submitted { name: item.name, id }).await.is_err() {
                    return;
                }
            }
            items = again;
            if !items.is_empty() {
                let problem = "the server has no room now".into();
                pause.wait(&Trouble::Later { problem, after: Duration::from_secs(1) }).await;
            }
        }
    }
}

fn body(items: &[Item]) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + items.iter().map(|i| i.json.len() + 1).sum::<usize>());
    let mut object = Object::new(&mut out);
    crate::wire::json::array(object.key("jobs"), items, |out, item| out.extend_from_slice(&item.json));
    object.end();
    out
}

/// The job's id, or why there is none; `None`: later.
fn outcome(result: &Value) -> Option<Result<String, String>> {
    match result["status"].as_u64() {
        Some(200 | 201) => Some(Ok(result["job"]["id"].as_str()?.to_owned())),
        Some(429 | 503) | None => None,
        Some(status) => {
            let text = |key: &str| result["problem"][key].as_str().unwrap_or_default().to_owned();
            let field = result["problem"]["field"].as_str().map(|f| format!(" ({f})")).unwrap_or_default();
            Some(Err(format!("{status} {}{field}: {}", text("code"), text("detail"))))
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn key(prefix: &str, name: &str) -> String {
    let key = format!("{prefix}/{name}");
    if key.len() <= KEY_BYTES {
        return key;
    }
    // Too long to stand as it is: the same name still gives the same key.
    format!("{prefix}/{:032x}", leasehold_core::opaque::hash(name.as_bytes()))
}

/// The content type that a file's name suggests.
fn guess(path: &Path) -> &'static str {
    let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    match extension.as_str() {
        "json" => "application/json",
        "txt" | "log" | "md" => "text/plain; charset=utf-8",
        "csv" => "text/csv",
        "html" | "htm" => "text/html",
        "xml" => "application/xml",
        "yaml" | "yml" => "application/yaml",
        "pdf" => "application/pdf",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "tif" | "tiff" => "image/tiff",
        "svg" => "image/svg+xml",
        "wav" => "audio/wav",
        "mp3" => "audio/mpeg",
        "mp4" => "video/mp4",
        "zip" => "application/zip",
        "gz" => "application/gzip",
        _ => "application/octet-stream",
    }
}

/// A count on standard error, when somebody is looking.
struct Progress {
    what: &'static str,
    count: usize,
    shown: bool,
}

impl Progress {
    fn new(what: &'static str) -> Self {
        Progress { what, count: 0, shown: std::io::stderr().is_terminal() && !std::io::stdout().is_terminal() }
    }

    fn count(&mut self) {
        self.count += 1;
        if self.shown && (self.count < 100 || self.count.is_multiple_of(100)) {
            eprint!("\r{} {}", self.what, self.count);
        }
    }

    fn clear(&self) {
        if self.shown {
            eprint!("\r\u{1b}[K");
        }
    }

    fn end(&self) {
        if self.shown && self.count > 0 {
            eprintln!("\r{} {}", self.what, self.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fit_and_repeat() {
        assert_eq!(key("p", "a.txt"), "p/a.txt");
        let long = "x".repeat(400);
        assert_eq!(key("p", &long), key("p", &long));
        assert!(key("p", &long).len() <= KEY_BYTES);
        assert_ne!(key("p", &long), key("p", &"y".repeat(400)));
    }

    #[test]
    fn an_item_is_done_refused_or_tried_again() {
        assert_eq!(outcome(&json!({"status": 201, "job": {"id": "x"}})), Some(Ok("x".into())));
        assert_eq!(outcome(&json!({"status": 503, "problem": {}})), None);
        assert_eq!(outcome(&Value::Null), None);
        let refused =
            outcome(&json!({"status": 422, "problem": {"code": "invalid_field", "field": "f", "detail": "d"}}));
        assert_eq!(refused, Some(Err("422 invalid_field (f): d".into())));
    }
}
