//! The command line: the server, and clients of it.

mod bench;
mod client;
mod look;
mod submit;
mod work;

use std::fmt;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, Flags};
use crate::serve;
use client::{Refused, Server, Trouble};

/// Exit codes besides 0: something was not done, or the command line is wrong (clap's own).
const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// A durable job system: jobs come in over HTTP, workers lease them, nothing is lost.
#[derive(Debug, Parser)]
#[command(
    name = "leasehold",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  leasehold                                   serve on 127.0.0.1:7411, jobs in ./leasehold-data
  leasehold submit --queue docs *.txt         a job a file
  leasehold work --queue docs -- wc -w        run a command for each job
  leasehold status                            what the queues hold"
)]
struct Cli {
    #[command(flatten)]
    serve: Flags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server (also without any command)
    Serve(Flags),
    /// Print the effective configuration
    Config(Flags),
    /// Submit jobs
    Submit(submit::Submit),
    /// Run a command for each job of a queue
    Work(work::Work),
    /// Show jobs by their ids, or what the queues hold
    Status(look::Status),
    /// Cancel jobs by their ids
    Cancel(look::Cancel),
    /// Show queues; pause, resume or purge one
    Queues(look::Queues),
    /// Print what has happened, and go on printing with --follow
    Events(look::Events),
    /// Measure a server
    Bench(bench::Bench),
}

/// Where the server is.
#[derive(Args, Clone, Debug)]
struct To {
    /// The server's address
    #[arg(long, value_name = "URL", env = "LEASEHOLD_SERVER", default_value = "http://127.0.0.1:7411")]
    server: Server,
}

/// Why a command did not do what it should.
#[derive(Debug)]
enum Failed {
    /// Said already.
    Quietly,
    Because(String),
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed::Because(error.to_string())
    }
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Failed::Because(refused.to_string())
    }
}

impl From<Trouble> for Failed {
    fn from(trouble: Trouble) -> Self {
        Failed::Because(trouble.to_string())
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Quietly => Ok(()),
            Failed::Because(why) => f.write_str(why),
        }
    }
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command.unwrap_or(Command::Serve(cli.serve)) {
        Command::Serve(flags) => return server(&flags),
        Command::Config(flags) => return print_config(&flags),
        Command::Submit(command) => client(command.run()),
        Command::Work(command) => client(command.run()),
        Command::Status(command) => client(command.run()),
        Command::Cancel(command) => client(command.run()),
        Command::Queues(command) => client(command.run()),
        Command::Events(command) => client(command.run()),
        Command::Bench(command) => client(command.run()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            if let Failed::Because(why) = failed {
                eprintln!("leasehold: {why}");
            }
            ExitCode::from(FAILED)
        }
    }
}

/// Runs a client's command.
fn client(command: impl Future<Output = Result<(), Failed>>) -> Result<(), Failed> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}

fn load(flags: &Flags) -> Result<Config, ExitCode> {
    // A variable that is not UTF-8 cannot be one of ours.
    let env = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    Config::load(flags, env).map_err(|bad| {
        eprintln!("leasehold: {bad}");
        ExitCode::from(USAGE)
    })
}

fn print_config(flags: &Flags) -> ExitCode {
    match load(flags) {
        Ok(config) => {
            print!("{}", config.to_toml());
            ExitCode::SUCCESS
        }
        Err(code) => code,
    }
}

fn server(flags: &Flags) -> ExitCode {
    let config = match load(flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    tracing_subscriber::fmt()
        .with_max_level(config.log)
        .with_target(false)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    match serve::serve(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("leasehold: {error}");
            ExitCode::from(FAILED)
        }
    }
}

/// Prints a line. Who reads it may have seen enough (`… | head`): then the command just ends.
fn print_line(line: &str) -> Result<(), Failed> {
    use std::io::Write as _;
    match writeln!(std::io::stdout().lock(), "{line}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failed::Quietly),
        other => Ok(other?),
    }
}

/// Tells of a server that does not answer, once, and when it does again.
#[derive(Debug, Default)]
struct Outage {
    told: bool,
}

impl Outage {
    fn trouble(&mut self, trouble: &Trouble) {
        if !std::mem::replace(&mut self.told, true) {
            eprintln!("leasehold: {}; trying again", printable(&trouble.to_string()));
        }
    }

    fn over(&mut self) {
        if std::mem::take(&mut self.told) {
            eprintln!("leasehold: the server answers again");
        }
    }
}

/// Text from a server as it can safely stand on a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
        for line in [
            "leasehold",
            "leasehold --listen 127.0.0.1:0 --store mem:",
            "leasehold serve --grace 5s",
            "leasehold submit --queue q a b --key-prefix p --wait --results d",
            "leasehold work --queue q --concurrency 4 -- sh -c true",
            "leasehold status --server http://x:1",
            "leasehold queues q --pause --reason why",
            "leasehold events --follow",
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap();
        }
        assert!(Cli::try_parse_from(["leasehold", "work", "--queue", "q"]).is_err());
    }
}
