//! The command line: the server, and clients of it.

/// Says something on standard error. Nobody may be there to hear it, which changes nothing: unlike
/// `eprintln!`, this does not panic then.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr().lock(), "leasehold: {}", format_args!($($text)*));
    }};
}

mod audit;
mod bench;
mod books;
mod client;
mod completions;
mod events;
mod failed;
mod inspect;
mod pools;
mod queues;
mod signals;
mod status;
mod submit;
mod table;
mod terminal;
mod work;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::config::{Config, Flags};
use crate::serve;
use client::{Server, Trouble};
use failed::Failed;
use terminal::{When, printable};

/// A durable job system: jobs come in over HTTP, workers lease them, nothing is lost.
#[derive(Debug, Parser)]
#[command(
    name = "leasehold",
    version,
    after_help = "\
Examples:
  leasehold                                   serve on 127.0.0.1:7411, jobs in ./leasehold-data
  leasehold submit --queue docs *.txt         a job a file
  leasehold work --queue docs -- wc -w        run a command for each job
  leasehold status                            what the queues hold

Exit codes of all commands: 0 done; 1 something was refused or failed; 2 wrong usage or configuration;
3 the server cannot be reached, or cannot do it now; 130, 143 ended by a signal."
)]
struct Cli {
    #[command(flatten)]
    serve: Flags,
    #[command(subcommand)]
    command: Option<Command>,
    /// Colours: auto (on a terminal, unless NO_COLOR is set), always or never
    #[arg(long, global = true, value_enum, hide_possible_values = true, value_name = "WHEN", default_value_t = When::Auto)]
    color: When,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server (also without any command)
    #[command(after_help = "\
Examples:
  leasehold serve --store disk:/var/lib/leasehold
  leasehold serve --store mem: --listen 127.0.0.1:0

Exit codes: 0 told to end, and ended; 1 the address is taken, the store cannot be opened, or told twice to
end; 2 wrong usage or configuration.")]
    Serve(Flags),
    Config(Effective),
    Submit(submit::Submit),
    Work(work::Work),
    Status(status::Status),
    Cancel(status::Cancel),
    Queues(queues::Queues),
    Pools(pools::Pools),
    Events(events::Events),
    Inspect(inspect::Inspect),
    Audit(audit::Audit),
    Bench(bench::Bench),
    Completions(completions::Completions),
}

impl Command {
    /// Whether standard output is for a program.
    fn is_json(&self) -> bool {
        match self {
            Command::Serve(_) | Command::Completions(_) => false,
            Command::Config(command) => command.json,
            Command::Submit(command) => command.json,
            Command::Work(command) => command.json,
            Command::Status(command) => command.json,
            Command::Cancel(command) => command.json,
            Command::Queues(command) => command.json,
            Command::Pools(command) => command.json,
            Command::Events(command) => command.json,
            Command::Inspect(command) => command.json,
            Command::Audit(command) => command.json,
            Command::Bench(command) => command.json,
        }
    }
}

/// Print the effective configuration
#[derive(Args, Debug)]
#[command(after_help = "\
What is printed can be read again with --config, but for values that are not shown: these are given anew.

Examples:
  leasehold config
  LEASEHOLD_GRACE=5s leasehold config --config /etc/leasehold.toml --json

Exit codes: 0 printed, 2 the configuration is wrong.")]
struct Effective {
    #[command(flatten)]
    flags: Flags,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Where the server is.
#[derive(Args, Clone, Debug)]
struct To {
    /// The server's address
    #[arg(long, value_name = "URL", env = "LEASEHOLD_SERVER", default_value = "http://127.0.0.1:7411")]
    server: Server,
}

/// Reads the command line. Flags of the server that stand before another command are refused: they
/// would mean nothing.
fn parse(line: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches_from(line)?;
    if let Some(name) = matches.subcommand_name() {
        let servers = Flags::augment_args(clap::Command::new("serve"));
        let given = |arg: &&clap::Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        if let Some(arg) = servers.get_arguments().find(given) {
            let flag = arg.get_long().unwrap_or_default();
            let why = format!("--{flag} is the server's: it cannot stand before `{name}`\n");
            return Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, why));
        }
    }
    Cli::from_arg_matches(&matches)
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    terminal::choose(cli.color);
    let command = cli.command.unwrap_or(Command::Serve(cli.serve));
    let as_json = command.is_json();
    let result = match command {
        Command::Serve(flags) => server(&flags),
        Command::Config(asked) => print_config(&asked),
        Command::Submit(command) => client(command.run()),
        Command::Work(command) => client(command.run()),
        Command::Status(command) => client(command.run()),
        Command::Cancel(command) => client(command.run()),
        Command::Queues(command) => client(command.run()),
        Command::Pools(command) => client(command.run()),
        Command::Events(command) => client(command.run()),
        Command::Inspect(command) => client(command.run()),
        Command::Audit(command) => client(command.run()),
        Command::Bench(command) => client(command.run()),
        Command::Completions(command) => command.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            let text = failed.to_string();
            if !text.is_empty() {
                say!("{text}");
            }
            if let Some(problem) = failed.json().filter(|_| as_json) {
                // Nobody may be there to read it: the status says it as well.
                let _ = print_line(&problem.to_string());
            }
            ExitCode::from(failed.code())
        }
    }
}

/// Runs a client's command.
fn client(command: impl Future<Output = Result<(), Failed>>) -> Result<(), Failed> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}

fn load(flags: &Flags) -> Result<Config, Failed> {
    // A variable that is not UTF-8 cannot be one of ours.
    let env = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    Config::load(flags, env).map_err(|bad| Failed::Usage(bad.to_string()))
}

fn print_config(asked: &Effective) -> Result<(), Failed> {
    let text = load(&asked.flags)?.to_toml();
    if !asked.json {
        return print_line(text.trim_end());
    }
    let table: toml::Table = text.parse().map_err(|e| Failed::Because(format!("{e}")))?;
    let json = serde_json::to_string(&table).map_err(|e| Failed::Because(e.to_string()))?;
    print_line(&json)
}

fn server(flags: &Flags) -> Result<(), Failed> {
    let config = load(flags)?;
    tracing_subscriber::fmt()
        .with_max_level(config.log)
        .with_target(false)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    Ok(serve::serve(&config)?)
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
            say!("{}; trying again", printable(&trouble.to_string()));
        }
    }

    fn over(&mut self) {
        if std::mem::take(&mut self.told) {
            say!("the server answers again");
        }
    }
}

/// Between two looks: a server is not to be kept busy by being looked at.
fn pace(text: &str) -> Result<std::time::Duration, String> {
    let short = std::time::Duration::from_millis(100);
    time(text).and_then(|pace| if pace < short { Err("give 100ms or more".to_owned()) } else { Ok(pace) })
}

/// A time on the command line: a number and a unit.
fn time(text: &str) -> Result<std::time::Duration, String> {
    crate::config::time("it", text).map_err(|_| "give a time as 500ms, 20s, 5m, 24h or 7d".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, clap::Error> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
        for line in [
            "leasehold",
            "leasehold --listen 127.0.0.1:0 --store mem:",
            "leasehold serve --grace 5s",
            "leasehold submit --queue q a b --key-prefix p --wait --results d",
            "leasehold work --queue q --queue r --concurrency 4 --timeout 5m -- sh -c true",
            "leasehold status --server http://x:1 --color never",
            "leasehold --color=always status",
            "leasehold status --queue q --status dead --watch",
            "leasehold queues q --pause --reason why",
            "leasehold pools gpu --total 8 --batch-max 6 --lease 30s",
            "leasehold pools gpu --delete",
            "leasehold events --follow",
            "leasehold completions bash",
            "leasehold inspect job 01 --store disk:x --json",
            "leasehold audit --repair --store disk:x",
        ] {
            parsed(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        for line in [
            "leasehold work --queue q",
            "leasehold work --queue q --timeout soon -- true",
            "leasehold submit --queue q --class urgent a",
            "leasehold status --color blue",
            "leasehold pools --total 8",
            "leasehold pools gpu --delete --total 8",
            "leasehold --listen 127.0.0.1:0 status",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn every_command_says_how_it_ends_and_gives_an_example() {
        for command in Cli::command().get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:\n"), "{help}");
            assert!(help.contains("Exit codes:"), "{help}");
            assert!(command.get_about().is_some(), "{help}");
        }
    }
}
