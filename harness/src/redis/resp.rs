//! The protocol of a Redis, as little of it as is needed: what is checked here shares no code with the
//! store that it checks.

use std::io::{BufRead as _, BufReader, Error, Read as _, Result, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// Commands sent before their answers are read.
const AHEAD: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Nil,
    Number(i64),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Error(String),
}

impl Value {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Value::Bytes(bytes) => bytes,
            _ => &[],
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    pub fn number(&self) -> i64 {
        match self {
            Value::Number(n) => *n,
            other => other.text().parse().unwrap_or_default(),
        }
    }

    pub fn list(&self) -> &[Value] {
        match self {
            Value::List(list) => list,
            _ => &[],
        }
    }
}

/// A connection of the harness's own, past every proxy.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// # Errors
    /// If there is nobody.
    pub fn open(port: u16, timeout: Duration) -> Result<Connection> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        Ok(Connection { stream: BufReader::new(stream) })
    }

    /// # Errors
    /// If there is no answer, or it is an error.
    pub fn ask(&mut self, command: &[&str]) -> Result<Value> {
        self.send(&[command.iter().map(|a| a.as_bytes().to_vec()).collect()])?;
        match self.answer()? {
            Value::Error(why) => Err(Error::other(why)),
            value => Ok(value),
        }
    }

    /// Many commands, and their answers in order.
    ///
    /// # Errors
    /// If there is no answer. An answer that is an error is given as such.
    pub fn ask_all(&mut self, commands: &[Vec<Vec<u8>>]) -> Result<Vec<Value>> {
        let mut answers = Vec::with_capacity(commands.len());
        for some in commands.chunks(AHEAD) {
            self.send(some)?;
            for _ in some {
                answers.push(self.answer()?);
            }
        }
        Ok(answers)
    }

    fn send(&mut self, commands: &[Vec<Vec<u8>>]) -> Result<()> {
        let mut out = Vec::new();
        for command in commands {
            out.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
            for argument in command {
                out.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
                out.extend_from_slice(argument);
                out.extend_from_slice(b"\r\n");
            }
        }
        self.stream.get_mut().write_all(&out)
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_end();
        let (Some(kind), rest) = (line.chars().next(), line.get(1..).unwrap_or_default()) else {
            return Err(Error::other("the connection has ended"));
        };
        let number = || rest.parse::<i64>().map_err(Error::other);
        Ok(match kind {
            '+' => Value::Bytes(rest.as_bytes().to_vec()),
            '-' => Value::Error(rest.to_owned()),
            ':' => Value::Number(number()?),
            '$' => match usize::try_from(number()?) {
                Err(_) => Value::Nil,
                Ok(len) => {
                    let mut bytes = vec![0; len + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(len);
                    Value::Bytes(bytes)
                }
            },
            '*' => match usize::try_from(number()?) {
                Err(_) => Value::Nil,
                Ok(len) => Value::List((0..len).map(|_| self.answer()).collect::<Result<_>>()?),
            },
            _ => return Err(Error::other(format!("an answer that is none: {line}"))),
        })
    }
}
