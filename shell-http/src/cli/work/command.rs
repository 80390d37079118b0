//! The command of one attempt: fed, listened to, and ended.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// Bytes of standard error that are sent with a failure.
const TAIL: usize = 4 * 1024;
/// Bytes of standard output that can be a result.
pub const RESULT: u64 = leasehold_core::limits::PAYLOAD_BYTES as u64;
/// Between asking a command to end and ending it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the output of a command that has ended is read, if what it has started holds it open.
const LINGER: Duration = Duration::from_secs(2);

/// What a command has said.
#[derive(Debug, Default)]
pub struct Said {
    pub output: Vec<u8>,
    pub tail: Vec<u8>,
    pub too_long: bool,
}

pub fn spawn(command: &[String], env: &[(&str, Option<&str>)]) -> io::Result<Child> {
    let (program, arguments) = command.split_first().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own: it is ended together with what it has started, and a terminal's
        // interrupt reaches only the worker, which lets it finish.
        .process_group(0)
        .kill_on_drop(true);
    for (name, value) in env {
        match value {
            Some(value) => command.env(name, value),
            // The worker's own must not pass for the job's.
            None => command.env_remove(name),
        };
    }
    command.spawn()
}

/// Feeds the command, listens to it, and waits for its end.
pub async fn talk(child: &mut Child, payload: Bytes, said: &mut Said) -> io::Result<ExitStatus> {
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = async {
        if let Some(mut input) = input {
            // A command need not read all of its input.
            let _ = input.write_all(&payload).await;
        }
    };
    let Said { output: result, tail, too_long } = said;
    let listen = async {
        let ((), result, tail) = tokio::join!(feed, read_result(output, result, too_long), read_tail(errors, tail));
        result.and(tail)
    };
    let mut listen = std::pin::pin!(listen);
    tokio::select! {
        heard = listen.as_mut() => {
            heard?;
            child.wait().await
        }
        status = child.wait() => {
            // What is in the pipes is read at once. Something in the background may hold them open:
            // it is not waited for.
            match tokio::time::timeout(LINGER, listen).await {
                Ok(heard) => heard.and(status),
                Err(_) => status,
            }
        }
    }
}

async fn read_result(
    output: Option<impl AsyncRead + Unpin>,
    result: &mut Vec<u8>,
    too_long: &mut bool,
) -> io::Result<()> {
    let Some(mut output) = output else { return Ok(()) };
    (&mut output).take(RESULT).read_to_end(result).await?;
    let mut one = [0];
    if output.read(&mut one).await? > 0 {
        *too_long = true;
        tokio::io::copy(&mut output, &mut tokio::io::sink()).await?;
    }
    Ok(())
}

/// Passes standard error on and keeps its end.
async fn read_tail(errors: Option<impl AsyncRead + Unpin>, tail: &mut Vec<u8>) -> io::Result<()> {
    use std::io::Write as _;
    let Some(mut errors) = errors else { return Ok(()) };
    let mut piece = [0; 4096];
    loop {
        let n = errors.read(&mut piece).await?;
        if n == 0 {
            return Ok(());
        }
        // Whoever reads our standard error may be gone; the job goes on.
        let _ = io::stderr().write_all(&piece[..n]);
        tail.extend_from_slice(&piece[..n]);
        tail.drain(..tail.len().saturating_sub(TAIL));
    }
}

/// Standard error's end as text: not begun in the middle of a character.
pub fn text(tail: &[u8]) -> String {
    let is_continued = |b: &&u8| **b & 0xc0 == 0x80;
    let cut = if tail.len() < TAIL { 0 } else { tail.iter().take(3).take_while(is_continued).count() };
    String::from_utf8_lossy(tail.get(cut..).unwrap_or_default()).trim().to_owned()
}

/// Ends the command and what it has started: first asks, then insists.
pub async fn end(group: Option<u32>, through: impl Future<Output = ()>) {
    let group = group.and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    let kill = |signal| {
        if let Some(group) = group {
            // It may have ended by itself just now.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    };
    kill(rustix::process::Signal::TERM);
    // Whoever is not through by then is not asked again.
    let _ = tokio::time::timeout(PATIENCE, through).await;
    // What the command had started may have outlived it.
    kill(rustix::process::Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_begins_with_a_whole_character() {
        let mut long = "é".repeat(TAIL).into_bytes();
        long.drain(..long.len() - TAIL + 1);
        long.push(b'x');
        assert!(text(&long).starts_with('é') && text(&long).ends_with('x'));
        assert_eq!(text(b" \xff short\n"), "\u{fffd} short");
    }
}
