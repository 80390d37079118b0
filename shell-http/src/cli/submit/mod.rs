//! `leasehold submit`: files and lines as jobs.
//!
//! A thread reads, some tasks send, and what came of each job is collected here. Every job has a key,
//! so that whatever is sent again is not done again.

mod group;
mod read;
mod send;
mod wait;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueHint};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::client::{Trouble, unique};
use super::signals::Signals;
use super::terminal::{Progress, printable};
use super::{Failed, To, print_line, time};
use read::{Options, Reader};
use send::Senders;
use wait::file_name;

/// How long calls under way may take to be answered after a signal.
const FAREWELL: Duration = Duration::from_secs(2);

/// Submit jobs: one for each file, or one for each line of standard input
#[derive(Args, Debug)]
#[command(after_help = "\
A .json file is sent as JSON, any other as its bytes with a content type guessed from its name. A line
that is a JSON object or list is sent as JSON, any other as text. Lines are sent as they come.

Every job gets an idempotency key, so that nothing is submitted twice when the server has to be asked
again: it is, on 429, 503 and lost connections, as long as --retry-for says. With --key-prefix the keys
stay the same from run to run: a second run submits only what is new. When interrupted, the command says
what was submitted, and with which prefix to go on.

With --json each job is an object on a line of its own, {\"id\", \"name\", \"status\"}, or, if it was not
submitted, {\"name\", \"problem\": {\"code\", \"detail\", \"status\"?}}. With --group it is one object, the group as in
the answer of GET /v1/groups/{id}: once all its children are submitted, with --wait once it has ended. What
ended the command early is a last line {\"problem\": {\"code\", \"detail\", \"status\"?}}.

Examples:
  leasehold submit --queue docs --key-prefix import-7 docs/*.txt
  seq 100 | leasehold submit --queue numbers -
  leasehold submit --queue docs --wait --results out docs/*.txt
  leasehold submit --queue docs --group --max-parallel 4 --wait --results out docs/*.txt

Exit codes: 0 all submitted (with --wait: all succeeded), 1 not all, 2 wrong usage, 3 the server could not
be reached for as long as --retry-for, 130 and 143 ended by a signal.")]
pub struct Submit {
    #[command(flatten)]
    to: To,
    /// The queue
    #[arg(long)]
    queue: String,
    /// Files; `-` is standard input, a job a line
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// Keys are PREFIX/NAME of the file, or PREFIX/NUMBER of the line [default: one of its own]
    #[arg(long, value_name = "PREFIX")]
    key_prefix: Option<String>,
    /// Priority [default: system]
    #[arg(long, value_parser = ["interactive", "system", "batch"])]
    class: Option<String>,
    /// Not before so many milliseconds from now
    #[arg(long, value_name = "MS", conflicts_with = "group")]
    delay_ms: Option<u64>,
    /// Attempts before the job is dead
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// Content type of the files, instead of guessing it
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// As the children of one group, which ends once, when all have ended
    #[arg(long)]
    group: bool,
    /// Children of the group that run at a time [default: all]
    #[arg(long, value_name = "N", requires = "group", value_parser = clap::value_parser!(u32).range(1..))]
    max_parallel: Option<u32>,
    /// Stop the group at the first child that is dead
    #[arg(long, requires = "group")]
    fail_fast: bool,
    /// Wait until every job has ended
    #[arg(long)]
    wait: bool,
    /// Write results to DIR/NAME.out
    #[arg(long, value_name = "DIR", requires = "wait", value_hint = ValueHint::DirPath)]
    results: Option<PathBuf>,
    /// Calls at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// How long to go on asking a server that does not answer
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = time)]
    retry_for: Duration,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print JSON, an object for each job, or for the group
    #[arg(long)]
    pub json: bool,
}

/// Why a job was not submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Problem {
    /// The server's, if it was asked.
    status: Option<u64>,
    code: String,
    detail: String,
}

impl Problem {
    fn json(&self) -> Value {
        let mut json = json!({"code": self.code, "detail": self.detail});
        if let Some(status) = self.status {
            json["status"] = status.into();
        }
        json
    }

    fn text(&self) -> String {
        match self.status {
            Some(status) => format!("{status} {}: {}", self.code, self.detail),
            None => self.detail.clone(),
        }
    }
}

/// What became of one job, or of the sending.
#[derive(Debug)]
enum Done {
    Job { name: String, id: Result<String, Problem> },
    GaveUp(Trouble),
}

/// All that became of them.
#[derive(Debug, Default)]
struct Tally {
    /// Names and ids, if they are waited for.
    jobs: Vec<(String, String)>,
    submitted: u64,
    failed: u64,
    /// Nobody reads standard output any more: the jobs are submitted all the same.
    unread: bool,
}

impl Submit {
    pub async fn run(mut self) -> Result<(), Failed> {
        self.check_names()?;
        let is_given = self.key_prefix.is_some();
        let prefix = self.key_prefix.get_or_insert_with(unique).clone();
        if let Some(dir) = &self.results {
            std::fs::create_dir_all(dir).map_err(|e| Failed::Because(format!("{}: {e}", dir.display())))?;
        }
        let mut signals = Signals::new()?;
        if self.group {
            return self.run_group(&prefix, &mut signals).await;
        }
        let mut tally = Tally::default();
        let go_on = || {
            let again = if is_given { "the same --key-prefix".into() } else { format!("--key-prefix {prefix}") };
            format!("The same command with {again} goes on where this one ended and submits nothing twice.")
        };
        self.submit(&prefix, &mut tally, &mut signals, &go_on).await?;
        if self.wait {
            self.wait_for(&mut tally, &mut signals, &go_on).await?;
        }
        match tally.failed {
            0 if tally.submitted == 0 => {
                say!("there was nothing to submit");
                Ok(())
            }
            0 => Ok(()),
            // Which, and why, has been told of each.
            n => {
                let what = if self.wait { "did not succeed or were not submitted" } else { "were not submitted" };
                say!("{n} of the jobs {what}");
                Err(Failed::Quietly)
            }
        }
    }

    async fn submit(
        &self,
        prefix: &str,
        tally: &mut Tally,
        signals: &mut Signals,
        go_on: &dyn Fn() -> String,
    ) -> Result<(), Failed> {
        let (stop, stopping) = watch::channel(false);
        let (done, mut all_done) = mpsc::channel::<Done>(1_000);
        let options = Options {
            queue: self.queue.clone(),
            prefix: prefix.to_owned(),
            class: self.class.clone(),
            delay_ms: self.delay_ms,
            max_attempts: self.max_attempts,
            content_type: self.content_type.clone(),
            child: false,
        };
        let items = Reader { files: self.files.clone(), options: options.clone() }.start(done.clone())?;
        let senders = Arc::new(Senders::new(self.to.server.clone(), options, self.retry_for, items, stopping));
        senders.start(self.parallel, done);
        let only_files = self.files.iter().all(|f| f.as_os_str() != "-");
        let total = only_files.then_some(self.files.len() as u64);
        let mut progress = Progress::new("submitted", total, self.quiet);
        let mut ended = None;
        let mut farewell = None;
        loop {
            let farewell_over = async {
                match farewell {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                number = signals.next(), if ended.is_none() => {
                    ended = Some(Failed::Signal { number, why: "interrupted".into() });
                }
                done = all_done.recv() => match done {
                    None => break,
                    Some(Done::Job { name, id }) => self.tell(&name, id, tally, &mut progress)?,
                    Some(Done::GaveUp(trouble)) => ended = ended.or(Some(Failed::from(trouble))),
                },
                () = farewell_over => break,
            }
            if ended.is_some() && farewell.is_none() {
                stop.send_replace(true);
                farewell = Some(tokio::time::Instant::now() + FAREWELL);
            }
        }
        let Some(ended) = ended else {
            progress.end();
            return Ok(());
        };
        progress.clear();
        let doubt = senders.taken().saturating_sub(tally.submitted + tally.failed);
        let of = total.map(|t| format!(" of {t}")).unwrap_or_default();
        let mut said = format!("{}{of} jobs were submitted", tally.submitted);
        if tally.failed > 0 {
            said.push_str(&format!(", {} were refused", tally.failed));
        }
        if doubt > 0 {
            said.push_str(&format!(", {doubt} may have been (no answer came)"));
        }
        Err(self.with(ended, &format!("{said}, and no more. {}", go_on())))
    }

    /// The same failure with more said about it.
    fn with(&self, failed: Failed, more: &str) -> Failed {
        match failed {
            Failed::Signal { number, why } => Failed::Signal { number, why: format!("{why}: {more}") },
            Failed::Unreachable { why, said } => Failed::Unreachable { why: format!("{why} {more}"), said },
            other => other,
        }
    }

    fn tell(
        &self,
        name: &str,
        id: Result<String, Problem>,
        tally: &mut Tally,
        progress: &mut Progress,
    ) -> Result<(), Failed> {
        let well = id.is_ok();
        match id {
            Ok(id) => {
                tally.submitted += 1;
                if self.wait {
                    tally.jobs.push((name.to_owned(), id));
                } else {
                    self.print(name, &id, "submitted", tally, progress)?;
                }
            }
            Err(problem) => {
                tally.failed += 1;
                progress.clear();
                if self.json {
                    self.line(&json!({"name": name, "problem": problem.json()}).to_string(), tally)?;
                }
                say!("{}: {}", printable(name), printable(&problem.text()));
            }
        }
        progress.count(well);
        Ok(())
    }

    fn print(
        &self,
        name: &str,
        id: &str,
        status: &str,
        tally: &mut Tally,
        progress: &mut Progress,
    ) -> Result<(), Failed> {
        progress.clear();
        let line = if self.json {
            json!({"id": id, "name": name, "status": status}).to_string()
        } else if self.wait {
            format!("{id}\t{}\t{status}", printable(name))
        } else {
            format!("{id}\t{}", printable(name))
        };
        self.line(&line, tally)
    }

    fn line(&self, line: &str, tally: &mut Tally) -> Result<(), Failed> {
        if tally.unread {
            return Ok(());
        }
        match print_line(line) {
            Err(Failed::Quietly) => {
                tally.unread = true;
                Ok(())
            }
            other => other,
        }
    }

    /// Two results must not go to one file, nor two jobs have one key.
    fn check_names(&self) -> Result<(), Failed> {
        let mut paths = BTreeSet::new();
        let mut names = BTreeMap::new();
        for path in &self.files {
            if !paths.insert(path) {
                return Err(Failed::Usage(format!("{} is given twice", path.display())));
            }
            if let (Some(_), Some(earlier)) = (&self.results, names.insert(file_name(path), path)) {
                let (a, b) = (earlier.display(), path.display());
                return Err(Failed::Usage(format!("the results of {a} and {b} would go to the same file")));
            }
        }
        Ok(())
    }
}
