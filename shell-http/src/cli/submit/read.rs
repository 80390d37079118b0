//! Files and lines, read on a thread of its own: a pipe may keep it waiting.

use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use super::{Done, Problem};
use crate::wire::json::Object;

/// Payloads above this are sent alone, as raw bodies.
const ALONE: usize = 256 * 1024;
/// Jobs that wait to be sent.
const AHEAD: usize = 200;
/// Idempotency keys, bytes.
const KEY_BYTES: usize = leasehold_core::limits::KEY_BYTES;
/// What no server takes, bytes.
const PAYLOAD_BYTES: u64 = leasehold_core::limits::PAYLOAD_BYTES as u64;
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// A job on its way.
#[derive(Clone, Debug)]
pub struct Item {
    /// The file's name or the line's number.
    pub name: String,
    pub key: String,
    pub body: Body,
}

#[derive(Clone, Debug)]
pub enum Body {
    /// The whole job, for a batch.
    Json(Vec<u8>),
    /// Large: its bytes alone.
    Raw { payload: Bytes, content_type: String },
}

impl Item {
    /// Bytes of its body.
    pub fn len(&self) -> usize {
        match &self.body {
            Body::Json(json) => json.len(),
            Body::Raw { payload, .. } => payload.len(),
        }
    }
}

/// What all jobs have in common.
#[derive(Clone, Debug)]
pub struct Options {
    pub queue: String,
    pub prefix: String,
    pub class: Option<String>,
    pub delay_ms: Option<u64>,
    pub max_attempts: Option<u32>,
    pub content_type: Option<String>,
    /// They are children of a group, which has all else.
    pub child: bool,
}

impl Options {
    fn item(&self, name: String, key: String, payload: Vec<u8>, content_type: &str) -> Item {
        let body = if payload.len() > ALONE && !self.child {
            Body::Raw { payload: payload.into(), content_type: content_type.to_owned() }
        } else {
            Body::Json(self.json(&payload, content_type, &key))
        };
        Item { name, key, body }
    }

    fn json(&self, payload: &[u8], content_type: &str, key: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + payload.len().div_ceil(3) * 4);
        let mut object = Object::new(&mut out);
        if !self.child {
            object.str("queue", &self.queue);
            object.str("idempotency_key", key);
        }
        if content_type == JSON {
            object.text("payload", payload);
        } else {
            object.str("payload_base64", &base64::engine::general_purpose::STANDARD.encode(payload));
            object.str("content_type", content_type);
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
}

pub struct Reader {
    pub files: Vec<PathBuf>,
    pub options: Options,
}

/// Nobody wants more.
struct Enough;

impl Reader {
    /// Reads until everything is read or nobody takes more.
    pub fn start(self, done: mpsc::Sender<Done>) -> std::io::Result<mpsc::Receiver<Item>> {
        let (items, receiver) = mpsc::channel(AHEAD);
        std::thread::Builder::new().name("leasehold-reader".into()).spawn(move || {
            // Who wants no more needs no word.
            let _ = self.read(&items, &done);
        })?;
        Ok(receiver)
    }

    fn read(&self, items: &mpsc::Sender<Item>, done: &mpsc::Sender<Done>) -> Result<(), Enough> {
        for path in &self.files {
            if path.as_os_str() == "-" {
                self.lines(items, done)?;
                continue;
            }
            let name = path.to_string_lossy().into_owned();
            match self.file(path, &name) {
                Ok(item) => items.blocking_send(item).map_err(|_| Enough)?,
                Err(detail) => refuse(done, name, detail)?,
            }
        }
        Ok(())
    }

    fn file(&self, path: &Path, name: &str) -> Result<Item, String> {
        let mut file = std::fs::File::open(path).map_err(|e| e.to_string())?;
        let mut payload = Vec::new();
        // What is no file, like a pipe, has no length to ask for.
        file.by_ref().take(PAYLOAD_BYTES + 1).read_to_end(&mut payload).map_err(|e| e.to_string())?;
        if payload.len() as u64 > PAYLOAD_BYTES {
            return Err(format!("is larger than {PAYLOAD_BYTES} bytes, which no server takes"));
        }
        let content_type = self.options.content_type.as_deref().unwrap_or_else(|| guess(path));
        if content_type == JSON {
            serde_json::from_slice::<&RawValue>(&payload).map_err(|e| format!("is not JSON: {e}"))?;
            // White space around it would make another job of it, depending on how it is sent.
            payload = payload.trim_ascii().to_vec();
        }
        Ok(self.options.item(name.to_owned(), key(&self.options.prefix, name), payload, content_type))
    }

    fn lines(&self, items: &mpsc::Sender<Item>, done: &mpsc::Sender<Done>) -> Result<(), Enough> {
        let mut input = std::io::stdin().lock();
        for n in 1_u64.. {
            let name = format!("line-{n}");
            let mut line = Vec::new();
            match input.by_ref().take(PAYLOAD_BYTES + 2).read_until(b'\n', &mut line) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return refuse(done, name, format!("standard input cannot be read: {error}")),
            }
            if line.len() as u64 > PAYLOAD_BYTES + 1 {
                return refuse(done, name, format!("is longer than {PAYLOAD_BYTES} bytes; what follows was not read"));
            }
            if line.last() == Some(&b'\n') {
                line.pop();
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
            }
            let (line, content_type) = line_of(line);
            let key = format!("{}/{n}", self.options.prefix);
            items.blocking_send(self.options.item(name, key, line, content_type)).map_err(|_| Enough)?;
        }
        Ok(())
    }
}

fn refuse(done: &mpsc::Sender<Done>, name: String, detail: String) -> Result<(), Enough> {
    let problem = Problem { status: None, code: "unreadable".into(), detail };
    done.blocking_send(Done::Job { name, id: Err(problem) }).map_err(|_| Enough)
}

/// A line's payload and what it is: a JSON object or list, other text, or just bytes.
fn line_of(line: Vec<u8>) -> (Vec<u8>, &'static str) {
    let trimmed = line.trim_ascii();
    let looks_like_json = trimmed.starts_with(b"{") || trimmed.starts_with(b"[");
    if looks_like_json && serde_json::from_slice::<&RawValue>(trimmed).is_ok() {
        return (trimmed.to_vec(), JSON);
    }
    let content_type = if std::str::from_utf8(&line).is_ok() { TEXT } else { "application/octet-stream" };
    (line, content_type)
}

fn key(prefix: &str, name: &str) -> String {
    let key = format!("{prefix}/{name}");
    // It may travel as a header: what cannot stand there is hashed, as is what would be too long.
    if key.len() <= KEY_BYTES && key.bytes().all(|b| b.is_ascii_graphic() || b == b' ') {
        return key;
    }
    format!("{prefix}/{:032x}", leasehold_core::opaque::hash(name.as_bytes()))
}

/// The content type that a file's name suggests.
fn guess(path: &Path) -> &'static str {
    let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    match extension.as_str() {
        "json" => JSON,
        "txt" | "log" | "md" => TEXT,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fit_and_repeat() {
        assert_eq!(key("p", "a b.txt"), "p/a b.txt");
        let long = "x".repeat(400);
        assert_eq!(key("p", &long), key("p", &long));
        assert!(key("p", &long).len() <= KEY_BYTES);
        assert_ne!(key("p", &long), key("p", &"y".repeat(400)));
        assert!(key("p", "ä\n").is_ascii());
    }

    #[test]
    fn what_a_line_is() {
        for (line, payload, kind) in [
            (&b" {\"a\": 1} "[..], &b"{\"a\": 1}"[..], JSON),
            (b"{not json", b"{not json", TEXT),
            (b" plain ", b" plain ", TEXT),
            (b"\xff", b"\xff", "application/octet-stream"),
        ] {
            assert_eq!(line_of(line.to_vec()), (payload.to_vec(), kind));
        }
    }
}
