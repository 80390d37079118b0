//! A model server to try the gateway with: a small language model, trained when it starts on the text of this
//! project's own manual, that streams what it makes up word by word.
//!
//! It knows nothing of Leasehold. Like a GPU server it takes so many requests at a time and refuses others, and
//! it counts what it is asked for: at once, at most, in all, by the class that the header `Leasehold-Class` names.
//!
//! ```text
//! POST /run              {"prompt"?, "max_tokens"?, "seed"?} -> {"text", "tokens"}
//! POST /v1/completions   the same; with "stream": true as server-sent events, a word each
//! GET  /stats            what it has counted
//! GET  /healthz
//! ```

#![allow(clippy::print_stdout, reason = "a program for a terminal")]

mod http;
mod model;

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Request;
use model::Model;
use serde_json::{Value, json};

const CORPUS: &[&str] = &[
    include_str!("../../../README.md"),
    include_str!("../../../docs/API.md"),
    include_str!("../../../docs/ARCHITECTURE.md"),
    include_str!("../../../docs/INVARIANTS.md"),
    include_str!("../../../docs/OPERATIONS.md"),
];
const USAGE: &str = "usage: ngram [--listen ADDRESS:PORT] [--slots N] [--pace-ms N]";
/// Words in one answer, unless it is told otherwise, and at most.
const WORDS: u64 = 40;
const WORDS_MAX: u64 = 2_000;

struct Server {
    model: Model,
    /// Requests that it works on at once; it refuses more.
    slots: usize,
    /// What a word costs, as if there were a larger model behind it.
    pace: Duration,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    now: BTreeMap<String, usize>,
    most: BTreeMap<String, usize>,
    most_in_all: usize,
    total: BTreeMap<String, u64>,
    refused: u64,
}

impl Counts {
    fn in_all(&self) -> usize {
        self.now.values().sum()
    }
}

/// One request that is worked on; given back when dropped.
struct Slot<'a> {
    server: &'a Server,
    class: String,
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, class: &str) -> Option<Slot<'_>> {
        let mut counts = self.lock();
        if counts.in_all() >= self.slots {
            counts.refused += 1;
            return None;
        }
        let now = counts.now.entry(class.into()).or_default();
        *now += 1;
        let now = *now;
        let most = counts.most.entry(class.into()).or_default();
        *most = now.max(*most);
        counts.most_in_all = counts.in_all().max(counts.most_in_all);
        *counts.total.entry(class.into()).or_default() += 1;
        Some(Slot { server: self, class: class.into() })
    }

    fn stats(&self) -> Value {
        let counts = self.lock();
        json!({
            "slots": self.slots,
            "now": counts.in_all(),
            "most": counts.most_in_all,
            "most_by_class": counts.most,
            "total": counts.total.values().sum::<u64>(),
            "total_by_class": counts.total,
            "refused": counts.refused,
            "words_known": self.model.words(),
        })
    }

    fn answer(&self, request: &Request, stream: &mut TcpStream) -> std::io::Result<()> {
        match (request.method.as_str(), request.path.split('?').next().unwrap_or_default()) {
            ("GET", "/healthz") => http::json(stream, 200, &json!({"status": "ok"}), &[]),
            ("GET", "/stats") => http::json(stream, 200, &self.stats(), &[]),
            ("POST", "/run" | "/v1/completions") => self.complete(request, stream),
            _ => http::json(stream, 404, &json!({"error": "there is no such path"}), &[]),
        }
    }

    fn complete(&self, request: &Request, stream: &mut TcpStream) -> std::io::Result<()> {
        let Some(_slot) = self.begin(request.header("leasehold-class").unwrap_or("none")) else {
            return http::json(stream, 429, &json!({"error": "all slots are taken"}), &["retry-after: 1"]);
        };
        let asked: Value = match serde_json::from_slice(&request.body) {
            Ok(Value::Object(asked)) => Value::Object(asked),
            _ => return http::json(stream, 400, &json!({"error": "the body must be a JSON object"}), &[]),
        };
        let prompt = asked["prompt"].as_str().unwrap_or_default();
        let words = asked["max_tokens"].as_u64().unwrap_or(WORDS).min(WORDS_MAX);
        let seed = asked["seed"].as_u64().unwrap_or(1);
        let made = self.model.continued(prompt, seed).take(usize::try_from(words).unwrap_or(usize::MAX));
        let paced = made.inspect(|_| std::thread::sleep(self.pace));
        if asked["stream"] == true {
            http::begin_events(stream)?;
            for word in paced {
                http::event(stream, &json!({"choices": [{"text": word}]}).to_string())?;
            }
            http::event(stream, "[DONE]")?;
            return http::end_events(stream);
        }
        // A client that hangs up is noticed between two words.
        let mut text = String::new();
        let mut tokens = 0;
        for word in paced {
            text.push_str(word);
            tokens += 1;
            if http::is_gone(stream) {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
        }
        http::json(stream, 200, &json!({"text": text.trim(), "tokens": tokens}), &[])
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        while let Some(request) = http::read(&mut stream)? {
            self.answer(&request, &mut stream)?;
        }
        Ok(())
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let Some(now) = self.server.lock().now.get_mut(&self.class) {
            *now -= 1;
        }
    }
}

fn main() -> ExitCode {
    let mut listen = "127.0.0.1:9000".to_owned();
    let (mut slots, mut pace_ms) = (8, 20);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        let number = value.parse::<u64>();
        match (flag.as_str(), number) {
            ("--listen", _) if !value.is_empty() => listen = value,
            ("--slots", Ok(n)) => slots = usize::try_from(n).unwrap_or(usize::MAX),
            ("--pace-ms", Ok(n)) => pace_ms = n,
            _ => {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    let listener = match TcpListener::bind(&listen) {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("ngram: cannot listen on {listen}: {error}");
            return ExitCode::FAILURE;
        }
    };
    let address = listener.local_addr().map_or(listen, |a| a.to_string());
    let model = Model::trained(CORPUS);
    println!("ngram knows {} words and listens: address={address}", model.words());
    let pace = Duration::from_millis(pace_ms);
    let server = Arc::new(Server { model, slots, pace, counts: Mutex::default() });
    for stream in listener.incoming().map_while(Result::ok) {
        let server = server.clone();
        std::thread::spawn(move || {
            // Whoever hangs up is through.
            let _ = server.serve(stream);
        });
    }
    ExitCode::SUCCESS
}
