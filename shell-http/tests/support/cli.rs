//! The command line as somebody uses it.

use std::process::{Child, Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use super::{BINARY, Server};

/// A command that talks to this server.
pub fn leasehold(server: &Server) -> Command {
    let mut command = bare();
    command.env("LEASEHOLD_SERVER", server.url());
    command
}

/// A command without a server.
pub fn bare() -> Command {
    let mut command = Command::new(BINARY);
    for name in ["LEASEHOLD_SERVER", "LEASEHOLD_CONFIG", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A process that does not outlive a test that fails.
#[derive(Debug)]
pub struct Guarded(pub Child);

impl std::ops::Deref for Guarded {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl std::ops::DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A worker of the queue `q` that runs a script for each job.
pub fn worker(server: &Server, more: &[&str], script: &str) -> Guarded {
    let mut command = leasehold(server);
    command.args(["work", "--queue", "q"]).args(more).args(["--", "sh", "-c", script]);
    Guarded(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

pub fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.unwrap(), signal).unwrap();
}

pub fn run(server: &Server, args: &[&str]) -> Output {
    leasehold(server).args(args).output().unwrap()
}

pub fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output as an object a line.
pub fn lines(output: &Output) -> Vec<Value> {
    out(output).lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
}
