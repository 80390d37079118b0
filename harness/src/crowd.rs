//! Many connections that want nothing, beside some that submit: what the submits feel of it.

use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::server::{Client, Server};

/// How many of each kind, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Crowd {
    pub idle: u64,
    pub polls: u64,
    pub slow: u64,
    pub submitters: u64,
    pub seconds: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    pub calls: usize,
    pub p50: Duration,
    pub p99: Duration,
    pub longest: Duration,
}

#[derive(Debug, Default)]
pub struct Report {
    /// With nobody else there.
    pub alone: Latency,
    pub crowded: Latency,
    /// KiB of the server that are resident: before, with the crowd, at the end.
    pub memory: [u64; 3],
    /// Slow clients that the server sent away, which came back.
    pub sent_away: u64,
    pub broken: Vec<String>,
}

/// # Errors
/// If the server does not start, or this machine does not allow so many connections.
pub fn crowd(binary: &Path, folder: &Path, crowd: Crowd) -> Result<Report> {
    allow_files(2 * (crowd.idle + crowd.polls + crowd.slow + crowd.submitters) + 512)?;
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let Some(server) = Server::start(binary, any, folder, None)? else { return Err(Error::other("no server")) };
    let mut report = Report::default();
    let address = server.address;
    report.alone = submits(address, crowd, &mut report.broken);
    report.memory[0] = server.resident_kib()?;

    let mut idle = Vec::new();
    for _ in 0..crowd.idle {
        idle.push(calls(address, "GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n", true)?);
    }
    let body = r#"{"worker":"crowd","queues":["nothing"],"wait_ms":60000}"#;
    let poll = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut polls = Vec::new();
    for _ in 0..crowd.polls {
        polls.push(calls(address, &poll, false)?);
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| slow_heads(address, crowd.slow, &over));
        report.crowded = submits(address, crowd, &mut report.broken);
        report.memory[1] = server.resident_kib().unwrap_or_default();
        over.store(true, Ordering::Relaxed);
        match slow.join() {
            Ok(sent_away) => report.sent_away = sent_away,
            Err(_) => report.broken.push("the slow clients".into()),
        }
    });
    // Nobody who kept to the rules was sent away.
    let lost = idle.iter().chain(&polls).filter(|s| closed(s)).count();
    if lost > 0 {
        report.broken.push(format!("{lost} idle or waiting connections were closed"));
    }
    drop((idle, polls));
    std::thread::sleep(Duration::from_secs(2));
    report.memory[2] = server.resident_kib()?;
    let (status, _) = Client::new(address).send("GET", "/readyz", None, "")?;
    if status != 200 {
        report.broken.push(format!("/readyz says {status} when all have gone"));
    }
    Ok(report)
}

/// Raises this process's limit of open files, which the server inherits.
fn allow_files(files: u64) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.current.map_or(files, |now| now.max(files));
    if limit.maximum.is_some_and(|most| most < wanted) {
        return Err(Error::other(format!("this machine allows {:?} open files, {wanted} are needed", limit.maximum)));
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }).map_err(Error::from)
}

/// A connection on which one call was sent, and answered if that is waited for.
fn calls(address: SocketAddr, call: &str, answered: bool) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(15)))?;
    stream.write_all(call.as_bytes())?;
    if answered {
        let mut answer = [0; 1024];
        let n = stream.read(&mut answer)?;
        if !answer.get(..n).unwrap_or_default().starts_with(b"HTTP/1.1 200") {
            return Err(Error::other(String::from_utf8_lossy(&answer).into_owned()));
        }
    }
    Ok(stream)
}

fn closed(stream: &TcpStream) -> bool {
    let at_once = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    !matches!(at_once, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

/// Clients that send a byte of their head each second. Who is sent away comes again.
fn slow_heads(address: SocketAddr, n: u64, over: &AtomicBool) -> u64 {
    let connect = || TcpStream::connect(address).ok();
    let mut streams: Vec<_> = (0..n).map(|_| connect()).collect();
    let (mut sent_away, mut round) = (0, 0);
    while !over.load(Ordering::Relaxed) {
        let byte = b"GET /v1/jobs?limit=1 HTTP/1.1\r\nx-slow: ".get(round).copied().unwrap_or(b'x');
        for stream in &mut streams {
            let gone = match stream {
                Some(stream) => closed(stream) || stream.write_all(&[byte]).is_err(),
                None => true,
            };
            if gone {
                sent_away += 1;
                *stream = connect();
            }
        }
        round += 1;
        std::thread::sleep(Duration::from_secs(1));
    }
    sent_away
}

/// Submits one by one over some connections for a time.
fn submits(address: SocketAddr, crowd: Crowd, broken: &mut Vec<String>) -> Latency {
    let end = Instant::now() + Duration::from_secs(crowd.seconds);
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..crowd.submitters).map(|_| scope.spawn(move || submit_until(address, end))).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut times = Vec::new();
    for result in results {
        match result {
            Ok(Ok(some)) => times.extend(some),
            Ok(Err(error)) => broken.push(format!("a submit: {error}")),
            Err(_) => broken.push("a submitter panicked".into()),
        }
    }
    times.sort_unstable();
    let at =
        |per_mille: usize| times.get((times.len() * per_mille / 1_000).min(times.len().saturating_sub(1))).copied();
    Latency {
        calls: times.len(),
        p50: at(500).unwrap_or_default(),
        p99: at(990).unwrap_or_default(),
        longest: times.last().copied().unwrap_or_default(),
    }
}

fn submit_until(address: SocketAddr, end: Instant) -> Result<Vec<Duration>> {
    let mut client = Client::new(address);
    let mut times = Vec::new();
    while Instant::now() < end {
        let begun = Instant::now();
        let body = r#"{"queue":"crowd","payload":{"text":"of a job like any other"}}"#;
        let (status, answer) = client.send("POST", "/v1/jobs", None, body)?;
        if status != 201 {
            return Err(Error::other(format!("{status} {}", String::from_utf8_lossy(&answer))));
        }
        times.push(begun.elapsed());
    }
    Ok(times)
}
