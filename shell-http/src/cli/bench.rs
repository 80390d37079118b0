//! `leasehold bench`: measures a server from outside.
//!
//! The load generator speaks raw HTTP/1.1 on one thread and parses as little as it can, since it
//! shares the machine with what it measures.

mod group;

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use super::client::{Server, Trouble, unique};
use super::{Failed, To, print_line};

/// Jobs in a batch.
const BATCH: usize = 100;
/// Jobs in the claims that are timed alone.
const CLAIM: usize = 10;

/// Measure a server: submits, batches, draining, claims at a small and a large backlog, a small and a large group
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Run it against a server with a fresh store: it leaves its jobs behind.

With --json each part is an object on a line of its own: {\"part\", \"jobs_per_second\", \"p50_ms\",
\"p99_ms\", \"max_ms\", \"errors\"}.

Examples:
  leasehold --store disk:/tmp/bench & sleep 1; leasehold bench
  leasehold bench --seconds 10 --connections 64 --backlog 500000
  leasehold bench --only submit,batch --json

Exit codes: 0 measured, 1 a connection broke off, 2 wrong usage, 3 the server cannot be reached.")]
pub struct Bench {
    #[command(flatten)]
    to: To,
    /// How long each part takes
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Connections that submit one by one
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// Connections that submit batches, and that drain
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batchers: u16,
    /// Bytes of each payload
    #[arg(long, value_name = "N", default_value_t = 100)]
    payload: usize,
    /// The large backlog; 0 leaves the claims out
    #[arg(long, value_name = "N", default_value_t = 500_000)]
    backlog: usize,
    /// Children of the large group; 0 leaves the groups out
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    children: usize,
    /// The queue to use [default: one of its own]
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Only the parts named
    #[arg(long, value_name = "PARTS", value_delimiter = ',', value_parser = ["submit", "batch", "drain", "claim", "group"])]
    only: Vec<String>,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

/// What one part found.
#[derive(Debug, Default)]
struct Measure {
    jobs: u64,
    errors: u64,
    calls: Vec<Duration>,
}

impl Measure {
    fn quantile(&mut self, q: f64) -> f64 {
        self.calls.sort_unstable();
        let at = ((self.calls.len() as f64 - 1.0) * q).round().max(0.0) as usize;
        self.calls.get(at).map_or(0.0, |d| d.as_secs_f64() * 1e3)
    }
}

impl Bench {
    pub async fn run(self) -> Result<(), Failed> {
        LocalSet::new().run_until(self.measure()).await
    }

    async fn open(&self) -> Result<Connection, Failed> {
        let unreachable = |e| Failed::from(Trouble::Connection(format!("{} cannot be reached: {e}", self.to.server)));
        Connection::open(&self.to.server).await.map_err(unreachable)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|p| p == part)
    }

    async fn measure(self) -> Result<(), Failed> {
        let queue = self.queue.clone().unwrap_or_else(|| format!("bench-{}", unique()));
        let time = Duration::from_secs(self.seconds);
        let title =
            format!("{:<34} {:>12} {:>9} {:>9} {:>9} {:>7}", "", "jobs/s", "p50 ms", "p99 ms", "max ms", "errors");
        if !self.json {
            print_line(&title)?;
        }
        let as_json = self.json;
        let row = |what: &str, mut m: Measure, took: Duration| {
            let rate = m.jobs as f64 / took.as_secs_f64();
            let (p50, p99, max) = (m.quantile(0.5), m.quantile(0.99), m.quantile(1.0));
            if as_json {
                let line = serde_json::json!({
                    "part": what, "jobs_per_second": rate, "p50_ms": p50, "p99_ms": p99, "max_ms": max,
                    "errors": m.errors,
                });
                return print_line(&line.to_string());
            }
            print_line(&format!("{what:<34} {rate:>12.0} {p50:>9.2} {p99:>9.2} {max:>9.2} {:>7}", m.errors))
        };
        if self.wants("submit") {
            let job = self.job(&queue);
            let (m, took) = self.together(self.connections, time, move |_| (job.clone(), "/v1/jobs", 1)).await?;
            row(&format!("submit, {} connections", self.connections), m, took)?;
        }
        if self.wants("batch") {
            let batch = self.batch(&queue, BATCH);
            let (m, took) =
                self.together(self.batchers, time, move |_| (batch.clone(), "/v1/jobs:batch", BATCH)).await?;
            row(&format!("submit in batches of {BATCH}, {} conn.", self.batchers), m, took)?;
        }
        if self.wants("drain") {
            let (m, took) = self.drain(&queue, time).await?;
            row(&format!("claim {BATCH} + complete, {} conn.", self.batchers), m, took)?;
        }
        if self.wants("claim") && self.backlog > 0 {
            for backlog in [1_000, self.backlog] {
                let m = self.claims(backlog).await?;
                let took = m.calls.iter().sum();
                row(&format!("claim {CLAIM} at backlog {backlog}"), m, took)?;
            }
        }
        if self.wants("group") && self.children > 0 {
            for children in [1_000, self.children] {
                let group::Grouped { created, ran, measure } = self.group(children).await?;
                let created_only = Measure { jobs: children as u64, ..Measure::default() };
                row(&format!("group of {children}: created"), created_only, created)?;
                row(&format!("group of {children}: run, {} at a time", group::PARALLEL), measure, ran)?;
            }
        }
        Ok(())
    }

    fn job(&self, queue: &str) -> String {
        format!("{{\"queue\":\"{queue}\",\"payload\":\"{}\"}}", "x".repeat(self.payload.saturating_sub(2)))
    }

    fn batch(&self, queue: &str, n: usize) -> String {
        format!("{{\"jobs\":[{}]}}", vec![self.job(queue); n].join(","))
    }

    /// The same call again and again over many connections.
    async fn together(
        &self,
        connections: u16,
        time: Duration,
        call: impl Fn(usize) -> (String, &'static str, usize),
    ) -> Result<(Measure, Duration), Failed> {
        let measure = Rc::new(RefCell::new(Measure::default()));
        let begun = Instant::now();
        let mut tasks = Vec::new();
        for n in 0..usize::from(connections) {
            let (body, path, jobs) = call(n);
            let mut connection = self.open().await?;
            let measure = measure.clone();
            tasks.push(tokio::task::spawn_local(async move {
                let request = connection.request(path, &body);
                while begun.elapsed() < time {
                    let sent = Instant::now();
                    let status = connection.call(&request).await?;
                    let mut m = measure.borrow_mut();
                    m.calls.push(sent.elapsed());
                    if matches!(status, 200 | 201) {
                        m.jobs += jobs as u64;
                    } else {
                        m.errors += 1;
                    }
                }
                Ok::<_, io::Error>(())
            }));
        }
        for task in tasks {
            task.await.map_err(|e| Failed::Because(e.to_string()))??;
        }
        let took = begun.elapsed();
        Ok((measure.take(), took))
    }

    /// Claims and completes in batches until nothing is left or the time is over.
    async fn drain(&self, queue: &str, time: Duration) -> Result<(Measure, Duration), Failed> {
        let measure = Rc::new(RefCell::new(Measure::default()));
        let begun = Instant::now();
        let mut tasks = Vec::new();
        for n in 0..usize::from(self.batchers) {
            let mut connection = self.open().await?;
            let measure = measure.clone();
            let claim = claim_body(queue, n, BATCH);
            tasks.push(tokio::task::spawn_local(async move {
                let claim = connection.request("/v1/claims", &claim);
                while begun.elapsed() < time {
                    let sent = Instant::now();
                    if connection.call(&claim).await? != 200 {
                        measure.borrow_mut().errors += 1;
                        continue;
                    }
                    let leases = leases(connection.body());
                    if leases.is_empty() {
                        break;
                    }
                    let request = connection.request("/v1/completions", &completions(&leases));
                    let status = connection.call(&request).await?;
                    let mut m = measure.borrow_mut();
                    m.calls.push(sent.elapsed());
                    let done = count(connection.body(), b"{\"status\":200}");
                    if status == 200 && done == leases.len() {
                        m.jobs += leases.len() as u64;
                    } else {
                        m.errors += 1;
                    }
                }
                Ok::<_, io::Error>(())
            }));
        }
        for task in tasks {
            task.await.map_err(|e| Failed::Because(e.to_string()))??;
        }
        let took = begun.elapsed();
        Ok((measure.take(), took))
    }

    /// Times single claims; what was claimed is completed and replaced, so the backlog stays.
    async fn claims(&self, backlog: usize) -> Result<Measure, Failed> {
        let queue = format!("bench-{}", unique());
        let each = backlog.div_ceil(usize::from(self.batchers)).div_ceil(BATCH);
        let mut tasks = Vec::new();
        for _ in 0..self.batchers {
            let mut connection = self.open().await?;
            let body = self.batch(&queue, BATCH.min(backlog.div_ceil(usize::from(self.batchers))));
            tasks.push(tokio::task::spawn_local(async move {
                let request = connection.request("/v1/jobs:batch", &body);
                for _ in 0..each {
                    while connection.call(&request).await? != 200 {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
                Ok::<_, io::Error>(())
            }));
        }
        for task in tasks {
            task.await.map_err(|e| Failed::Because(e.to_string()))??;
        }
        let mut measure = Measure::default();
        let mut connection = self.open().await?;
        let claim = connection.request("/v1/claims", &claim_body(&queue, 0, CLAIM));
        let replace = connection.request("/v1/jobs:batch", &self.batch(&queue, CLAIM));
        for _ in 0..200 {
            let sent = Instant::now();
            let status = connection.call(&claim).await?;
            measure.calls.push(sent.elapsed());
            let leases = leases(connection.body());
            if status != 200 || leases.len() != CLAIM {
                measure.errors += 1;
                continue;
            }
            measure.jobs += CLAIM as u64;
            let request = connection.request("/v1/completions", &completions(&leases));
            connection.call(&request).await?;
            connection.call(&replace).await?;
        }
        Ok(measure)
    }
}

fn claim_body(queue: &str, worker: usize, max: usize) -> String {
    format!("{{\"worker\":\"bench-{worker}\",\"queues\":[\"{queue}\"],\"max\":{max}}}")
}

fn completions(leases: &[(String, String)]) -> String {
    let mut out = String::from("{\"items\":[");
    for (n, (id, token)) in leases.iter().enumerate() {
        let comma = if n > 0 { "," } else { "" };
        // Writing to a string cannot fail.
        let _ = write!(out, "{comma}{{\"id\":\"{id}\",\"token\":\"{token}\",\"result\":{{\"ok\":true}}}}");
    }
    out.push_str("]}");
    out
}

/// Ids and tokens of a claim's answer. The payloads are our own and hold neither.
fn leases(body: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(body);
    let mut out = Vec::new();
    let mut rest = &*text;
    while let Some((id, after)) = between(rest, "{\"id\":\"") {
        let Some((token, after)) = between(after, "\"token\":\"") else { break };
        out.push((id.to_owned(), token.to_owned()));
        rest = after;
    }
    out
}

fn between<'a>(text: &'a str, start: &str) -> Option<(&'a str, &'a str)> {
    let (_, after) = text.split_once(start)?;
    after.split_once('"')
}

fn count(body: &[u8], what: &[u8]) -> usize {
    body.windows(what.len()).filter(|w| *w == what).count()
}

/// A connection that knows just enough of HTTP.
struct Connection {
    stream: TcpStream,
    host: String,
    buffer: Vec<u8>,
    head: usize,
}

impl Connection {
    async fn open(server: &Server) -> io::Result<Connection> {
        let address = server.address();
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, host: address.to_owned(), buffer: Vec::new(), head: 0 })
    }

    fn request(&self, path: &str, body: &str) -> Vec<u8> {
        format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        )
        .into_bytes()
    }

    fn get(&self, path: &str) -> Vec<u8> {
        format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", self.host).into_bytes()
    }

    /// Sends and reads the whole answer; gives its status.
    async fn call(&mut self, request: &[u8]) -> io::Result<u16> {
        self.buffer.clear();
        self.stream.write_all(request).await?;
        let mut needed = None;
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if needed.is_none()
                && let Some(head) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n")
            {
                self.head = head + 4;
                needed = Some(self.head + content_length(&self.buffer[..head])?);
            }
            if needed.is_some_and(|n| self.buffer.len() >= n) {
                break;
            }
        }
        let status = self.buffer.get(9..12).and_then(|s| std::str::from_utf8(s).ok()).and_then(|s| s.parse().ok());
        status.ok_or_else(|| io::Error::other("no status in an answer"))
    }

    fn body(&self) -> &[u8] {
        self.buffer.get(self.head..).unwrap_or_default()
    }
}

fn content_length(head: &[u8]) -> io::Result<usize> {
    let name = b"content-length: ";
    let at = head.windows(name.len()).position(|w| w.eq_ignore_ascii_case(name));
    let digits = at.map(|at| &head[at + name.len()..]).unwrap_or_default();
    let end = digits.iter().position(|b| !b.is_ascii_digit()).unwrap_or(digits.len());
    let text = std::str::from_utf8(&digits[..end]).unwrap_or_default();
    text.parse().map_err(|_| io::Error::other("an answer without a length"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_found() {
        let body = br#"{"jobs":[{"id":"A","token":"t1","payload":"xx"},{"id":"B","token":"t2"}]}"#;
        assert_eq!(leases(body), [("A".into(), "t1".into()), ("B".into(), "t2".into())]);
        assert_eq!(content_length(b"HTTP/1.1 200 OK\r\nContent-Length: 42\r\nx: y").unwrap(), 42);
    }
}
