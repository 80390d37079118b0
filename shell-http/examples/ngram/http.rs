//! As much of HTTP/1.1 as a model server needs.

use std::io::{ErrorKind, Read as _, Result, Write as _};
use std::net::TcpStream;

use serde_json::Value;

const HEAD_BYTES: usize = 64 * 1024;
const BODY_BYTES: usize = 16 * 1024 * 1024;

pub struct Request {
    pub method: String,
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }
}

/// The next request of a connection; `None`: there is none.
pub fn read(stream: &mut TcpStream) -> Result<Option<Request>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if head.len() > HEAD_BYTES || stream.read(&mut byte)? == 0 {
            return if head.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head);
    let mut lines = head.lines();
    let mut first = lines.next().unwrap_or_default().split(' ');
    let mut word = || first.next().unwrap_or_default().to_owned();
    let (method, path) = (word(), word());
    let header = |line: &str| line.split_once(':').map(|(k, v)| (k.to_ascii_lowercase(), v.trim().to_owned()));
    let headers: Vec<(String, String)> = lines.filter_map(header).collect();
    let mut request = Request { method, path, headers, body: Vec::new() };
    if request.header("transfer-encoding").is_some() {
        loop {
            let size = usize::from_str_radix(&line(stream)?, 16).map_err(|_| ErrorKind::InvalidData)?;
            take(stream, &mut request.body, size)?;
            line(stream)?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(len) = request.header("content-length").and_then(|v| v.parse().ok()) {
        take(stream, &mut request.body, len)?;
    }
    Ok(Some(request))
}

fn take(stream: &mut TcpStream, body: &mut Vec<u8>, len: usize) -> Result<()> {
    if body.len().saturating_add(len) > BODY_BYTES {
        return Err(ErrorKind::InvalidData.into());
    }
    let from = body.len();
    body.resize(from + len, 0);
    stream.read_exact(&mut body[from..])
}

fn line(stream: &mut TcpStream) -> Result<String> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > HEAD_BYTES {
            return Err(ErrorKind::InvalidData.into());
        }
    }
    Ok(String::from_utf8_lossy(&line).trim().to_owned())
}

pub fn json(stream: &mut TcpStream, status: u16, body: &Value, headers: &[&str]) -> Result<()> {
    let body = body.to_string();
    let more: String = headers.iter().map(|h| format!("{h}\r\n")).collect();
    let head = format!("HTTP/1.1 {status} \r\ncontent-type: application/json\r\n{more}content-length: {}", body.len());
    stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes())
}

pub fn begin_events(stream: &mut TcpStream) -> Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())
}

pub fn event(stream: &mut TcpStream, data: &str) -> Result<()> {
    let event = format!("data: {data}\n\n");
    stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes())
}

pub fn end_events(stream: &mut TcpStream) -> Result<()> {
    stream.write_all(b"0\r\n\r\n")
}

/// Whether the client has hung up.
pub fn is_gone(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let gone = match stream.peek(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).is_err() || gone
}
