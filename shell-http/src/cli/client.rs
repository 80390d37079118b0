//! A small HTTP client: one connection, kept open, opened again when it broke.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::body::Body;

/// A server that cannot be connected to within this is not there.
const CONNECT: Duration = Duration::from_secs(5);
/// A call is answered by then, besides what it waits for on purpose.
const ANSWER: Duration = Duration::from_secs(30);
/// First and longest pause between two tries.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Where the server is: `http://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    authority: String,
    address: String,
}

impl std::str::FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("https://") {
            return Err("https is not spoken here: put the server's plain address, as http://127.0.0.1:7411".into());
        }
        let bad = || format!("`{text}` is not a server's address: give http://HOST:PORT");
        let authority = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        if authority.is_empty() || authority.contains(['/', '?', '#', '@', ' ']) {
            return Err(bad());
        }
        let has_port = match authority.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && (!host.contains(':') || host.ends_with(']')) => {
                port.parse::<u16>().map_err(|_| bad())?;
                true
            }
            _ => false,
        };
        let address = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        Ok(Server { authority: authority.to_owned(), address })
    }
}

impl Server {
    /// Host and port, to connect to.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.authority)
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Trouble {
    /// The server cannot be reached, or hung up: it may or may not have got the call.
    Connection(String),
    /// It answered that it could not now; after so long it may.
    Later { refused: Refused, after: Duration },
    /// It said no.
    Refused(Refused),
}

/// What the server said when it did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub status: StatusCode,
    pub code: String,
    pub detail: String,
}

impl Refused {
    /// As it is shown with `--json`.
    pub fn json(&self) -> Value {
        serde_json::json!({"status": self.status.as_u16(), "code": self.code, "detail": self.detail})
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status.as_u16(), self.code, self.detail)
    }
}

impl Trouble {
    /// The last of so many.
    fn after(self, tries: u64, took: Duration) -> Trouble {
        match self {
            Trouble::Connection(why) if tries > 1 => {
                Trouble::Connection(format!("{why} (tried {tries} times in {:.1} s)", took.as_secs_f64()))
            }
            other => other,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Connection(why) => f.write_str(why),
            Trouble::Later { refused, .. } | Trouble::Refused(refused) => refused.fmt(f),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Result<Value, Trouble> {
        serde_json::from_slice(&self.body).map_err(|e| Trouble::Connection(format!("the answer is not JSON: {e}")))
    }
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: Method,
    pub path: String,
    pub body: Option<Bytes>,
    pub content_type: String,
    /// `Idempotency-Key`.
    pub key: Option<String>,
    /// Longer than usual: the server waits on purpose.
    pub wait: Duration,
}

impl Call {
    pub fn get(path: impl Into<String>) -> Call {
        Call {
            method: Method::GET,
            path: path.into(),
            body: None,
            content_type: "application/json".into(),
            key: None,
            wait: Duration::ZERO,
        }
    }

    pub fn post(path: impl Into<String>, body: impl Into<Bytes>) -> Call {
        Call { method: Method::POST, body: Some(body.into()), ..Call::get(path) }
    }

    pub fn put(path: impl Into<String>, body: impl Into<Bytes>) -> Call {
        Call { method: Method::PUT, ..Call::post(path, body) }
    }

    pub fn delete(path: impl Into<String>) -> Call {
        Call { method: Method::DELETE, ..Call::get(path) }
    }
}

#[derive(Debug)]
pub struct Client {
    server: Server,
    sender: Option<SendRequest<Body>>,
}

impl Client {
    pub fn new(server: Server) -> Self {
        Client { server, sender: None }
    }

    /// One try.
    pub async fn call(&mut self, call: &Call) -> Result<Answer, Trouble> {
        let answer = tokio::time::timeout(ANSWER + call.wait, self.exchange(call)).await;
        let result = answer.unwrap_or_else(|_| Err(Trouble::Connection(format!("{} does not answer", self.server))));
        if matches!(result, Err(Trouble::Connection(_))) {
            self.sender = None;
        }
        result
    }

    async fn exchange(&mut self, call: &Call) -> Result<Answer, Trouble> {
        let (status, retry_after, mut body) = self.start(call).await?;
        let mut all = BytesMut::new();
        while let Some(piece) = next(&mut body).await? {
            all.extend_from_slice(&piece);
        }
        judge(Answer { status, body: all.freeze() }, retry_after)
    }

    async fn start(&mut self, call: &Call) -> Result<(StatusCode, Option<u64>, Incoming), Trouble> {
        let mut request = hyper::Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            .header(HOST, &self.server.authority)
            .header(USER_AGENT, concat!("leasehold/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, &call.content_type);
        if let Some(key) = &call.key {
            request = request.header("idempotency-key", key);
        }
        let request = request
            .body(call.body.clone().map_or_else(Body::empty, Body::full))
            .map_err(|e| Trouble::Connection(format!("the call cannot be made: {e}")))?;
        let sender = self.connected().await?;
        let lost = |e: hyper::Error| Trouble::Connection(format!("the connection broke off: {e}"));
        let response = sender.send_request(request).await.map_err(lost)?;
        let retry_after =
            response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
        Ok((response.status(), retry_after, response.into_body()))
    }

    /// The open connection, or a new one.
    async fn connected(&mut self) -> Result<&mut SendRequest<Body>, Trouble> {
        let mut ready = match self.sender.take() {
            Some(mut sender) => sender.ready().await.is_ok().then_some(sender),
            None => None,
        };
        if ready.is_none() {
            let unreachable = |why: String| Trouble::Connection(format!("{} cannot be reached: {why}", self.server));
            let stream = tokio::time::timeout(CONNECT, TcpStream::connect(&self.server.address))
                .await
                .map_err(|_| unreachable("no answer".into()))?
                .map_err(|e| unreachable(e.to_string()))?;
            stream.set_nodelay(true).map_err(|e| unreachable(e.to_string()))?;
            let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|e| unreachable(e.to_string()))?;
            tokio::spawn(async move {
                // A connection that breaks is noticed by the call that uses it.
                let _ = connection.await;
            });
            ready = Some(sender);
        }
        ready.map(|sender| self.sender.insert(sender)).ok_or_else(|| Trouble::Connection("no connection".into()))
    }

    /// Tries until there is an answer or a refusal, or it has gone on for so long without either: then
    /// the last trouble is told. Only for calls that can be repeated without harm.
    pub async fn insist(
        &mut self,
        call: &Call,
        patience: Option<Duration>,
        say: &mut (dyn FnMut(&Trouble) + Send),
    ) -> Result<Answer, Trouble> {
        let mut pause = Pause::new();
        let begun = Instant::now();
        let mut tries = 0_u64;
        loop {
            tries += 1;
            let trouble = match self.call(call).await {
                Ok(answer) => return Ok(answer),
                Err(Trouble::Refused(refused)) => return Err(Trouble::Refused(refused)),
                Err(trouble) => trouble,
            };
            if patience.is_some_and(|p| begun.elapsed() >= p) {
                return Err(trouble.after(tries, begun.elapsed()));
            }
            say(&trouble);
            pause.wait(&trouble).await;
        }
    }
}

async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Trouble> {
    struct Frame<'a>(&'a mut Incoming);
    impl Future for Frame<'_> {
        type Output = Option<Result<hyper::body::Frame<Bytes>, hyper::Error>>;
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            Pin::new(&mut *self.0).poll_frame(cx)
        }
    }
    loop {
        match Frame(body).await {
            None => return Ok(None),
            Some(Err(e)) => return Err(Trouble::Connection(format!("the connection broke off: {e}"))),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

fn judge(answer: Answer, retry_after: Option<u64>) -> Result<Answer, Trouble> {
    if answer.status.is_success() {
        return Ok(answer);
    }
    let problem: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let text = |key: &str| problem[key].as_str().unwrap_or_default().to_owned();
    // Which field it is about stands beside the text.
    let field = problem["field"].as_str().map(|field| format!("{field} ")).unwrap_or_default();
    let mut refused =
        Refused { status: answer.status, code: text("code"), detail: format!("{field}{}", text("detail")) };
    if refused.code.is_empty() {
        refused.code = format!("http_{}", answer.status.as_u16());
        refused.detail = "this is no answer of a Leasehold server, which would say why".into();
    }
    match answer.status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::REQUEST_TIMEOUT => {
            Err(Trouble::Later { refused, after: Duration::from_secs(retry_after.unwrap_or(1)) })
        }
        status if status.is_server_error() => Err(Trouble::Later { refused, after: BACKOFF_MIN }),
        _ => Err(Trouble::Refused(refused)),
    }
}

/// Growing pauses between tries.
#[derive(Debug)]
pub struct Pause(Duration);

impl Pause {
    pub fn new() -> Self {
        Pause(BACKOFF_MIN)
    }

    pub async fn wait(&mut self, trouble: &Trouble) {
        let least = match trouble {
            Trouble::Later { after, .. } => (*after).min(BACKOFF_MAX),
            _ => Duration::ZERO,
        };
        // Clients that lost their server together do not come back together.
        let jitter = self.0.mul_f64(f64::from(random_byte()) / 512.0);
        tokio::time::sleep(self.0.max(least) + jitter).await;
        self.0 = (self.0 * 2).min(BACKOFF_MAX);
    }
}

impl Default for Pause {
    fn default() -> Self {
        Pause::new()
    }
}

fn random_byte() -> u8 {
    let mut byte = [128];
    // Without randomness the middle will do.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}

/// A name that nobody else has.
pub fn unique() -> String {
    let mut bytes = [0u8; 12];
    // Without randomness the process and the time still differ.
    if getrandom::fill(&mut bytes).is_err() {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        return format!("{}-{nanos}", std::process::id());
    }
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, address) in [
            ("http://127.0.0.1:7411", "127.0.0.1:7411"),
            ("localhost:7411/", "localhost:7411"),
            ("http://leasehold", "leasehold:80"),
            ("http://[::1]:7411", "[::1]:7411"),
        ] {
            assert_eq!(text.parse::<Server>().unwrap().address, address);
        }
        for bad in ["", "https://x", "http://", "http://x/y", "http://x:port", "http://u@x"] {
            assert!(bad.parse::<Server>().is_err(), "{bad}");
        }
    }
}
