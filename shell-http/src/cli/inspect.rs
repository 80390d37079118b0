//! `leasehold inspect`: what a store holds of one thing, as it stands there.

use clap::{Args, ValueEnum};
use leasehold_core::request::Inspect as Wanted;
use leasehold_core::{JobId, Request};
use serde_json::Value;

use super::books::Where;
use super::client::Call;
use super::queues::print_queues;
use super::terminal::{Colour, printable};
use super::{Failed, print_line};
use crate::wire::submit::TENANT;
use crate::wire::{query, time};

/// Microseconds since 1970 that are a time and no small number: from 2001 on.
const A_TIME: u64 = 1_000_000_000_000_000;

/// Show what a store holds of a job, a queue or a key, as it stands there
#[derive(Args, Debug)]
#[command(after_help = "\
  job ID       its records (home and policy, lease, history, …) and the places where it stands
  queue NAME   its settings, and how many jobs stand in each of its indexes
  key KEY      what an idempotency key is bound to
  names        the queues that are known
  quarantine   records that are set aside because they cannot be read

Payloads and results are not shown, only their lengths. Nothing is changed. A stopped store is opened as a
server would open it, under its lock.

With --json the answer is one document: {\"at\", \"records\", \"places\", \"counts\"}, of names {\"queues\"}. The
`text` of a record is for people and may change.

Examples:
  leasehold inspect job 01J8ZQ3V9K007Q4M2X5N6P7R8S
  leasehold inspect queue docs --store disk:/var/lib/leasehold
  leasehold inspect key import-7/a.txt --json
  leasehold inspect quarantine

Exit codes: 0 shown, 1 there is no such thing, or the store cannot be opened, 2 wrong usage, 3 the server
cannot be reached.")]
pub struct Inspect {
    /// What to look at
    #[arg(value_enum)]
    what: What,
    /// Which job, queue or key
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    #[command(flatten)]
    place: Where,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    Job,
    Queue,
    Key,
    Names,
    Quarantine,
}

impl Inspect {
    pub async fn run(self) -> Result<(), Failed> {
        let (call, request) = self.wanted()?;
        let mut books = self.place.open(false).await?;
        let seen = books.ask(&call, request).await;
        books.close();
        let seen = seen?;
        if self.json {
            return print_line(&seen.to_string());
        }
        let lines = match self.what {
            What::Names => print_queues(&seen["queues"], false),
            What::Quarantine if seen["records"].as_array().is_none_or(Vec::is_empty) => {
                vec!["nothing is in quarantine".into()]
            }
            _ => lines(&seen),
        };
        lines.iter().try_for_each(|l| print_line(l))
    }

    fn wanted(&self) -> Result<(Call, Request), Failed> {
        let (tenant, what) = (TENANT.to_owned(), self.what);
        let name = match (&self.name, what) {
            (Some(name), What::Job | What::Queue | What::Key) => name.clone(),
            (None, What::Names | What::Quarantine) => String::new(),
            (Some(name), _) => {
                return Err(Failed::Usage(format!("`names` and `quarantine` show all there is: leave `{name}` out")));
            }
            (None, What::Job) => return Err(Failed::Usage("say which job: `leasehold inspect job ID`".into())),
            (None, What::Queue) => return Err(Failed::Usage("say which queue: `leasehold inspect queue NAME`".into())),
            (None, What::Key) => return Err(Failed::Usage("say which key: `leasehold inspect key KEY`".into())),
        };
        let of = query::encode(&name);
        Ok(match what {
            What::Job => {
                let id: JobId = name.parse().map_err(|_| {
                    Failed::Usage(format!(
                        "`{name}` is no job's id: that has 26 digits and capital letters, as 01J8ZQ3V9K007Q4M2X5N6P7R8S; \
                         a group's child has its number besides, as 01M8PVDY4F02GQXG9DD01G0000-0000007"
                    ))
                })?;
                (Call::get(format!("/v1/jobs/{of}/records")), Request::Inspect(Wanted::Job(id)))
            }
            What::Queue => {
                let queue = Wanted::Queue { tenant, queue: name };
                (Call::get(format!("/v1/queues/{of}/records")), Request::Inspect(queue))
            }
            What::Key => (Call::get(format!("/v1/keys/{of}")), Request::Inspect(Wanted::Key { tenant, key: name })),
            What::Names => (Call::get("/v1/queues"), Request::Queues { tenant }),
            What::Quarantine => (Call::get("/v1/quarantine"), Request::Inspect(Wanted::Quarantine)),
        })
    }
}

fn lines(seen: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().map(printable).unwrap_or_default();
    let list = |name: &str| seen[name].as_array().cloned().unwrap_or_default();
    let mut out = vec![format!("at {}", text(&seen["at"]))];
    for record in list("records") {
        let (key, bytes) = (text(&record["key"]), record["bytes"].as_u64().unwrap_or(0));
        out.push(format!("{}  {bytes} bytes", Colour::Bold.paint(&key)));
        let expires = match &record["expires_at"] {
            Value::Null => "never expires".into(),
            at => format!("expires {}", text(at)),
        };
        out.push(format!("  put {}, {expires}, version {}", text(&record["at"]), text(&record["version"])));
        let fields = record["text"].as_str().unwrap_or_default();
        out.extend(fields.lines().map(|line| format!("    {}", annotated(&printable(line)))));
    }
    for place in list("places") {
        let score = place["score"].as_u64().unwrap_or(0);
        out.push(format!("{}  {}", Colour::Bold.paint(&text(&place["index"])), clock(score)));
    }
    for count in list("counts") {
        let (index, members) = (text(&count["index"]), count["members"].as_u64().unwrap_or(0));
        out.push(format!("{}  {members} members", Colour::Bold.paint(&index)));
    }
    out
}

/// A score, as the time that it is.
fn clock(score: u64) -> String {
    match as_time(score) {
        Some(time) => format!("at {time}"),
        None => format!("at {score}"),
    }
}

/// A field that is a clock, with the time that it is.
fn annotated(line: &str) -> String {
    let number = line.rsplit_once(": ").and_then(|(_, value)| value.trim_end_matches(',').parse().ok());
    match number.and_then(as_time) {
        Some(time) => format!("{line}  {}", Colour::Dim.paint(&format!("({time})"))),
        None => line.to_owned(),
    }
}

fn as_time(micros: u64) -> Option<String> {
    if !(A_TIME..leasehold_core::store::SCORE_MAX).contains(&micros) {
        return None;
    }
    let mut out = Vec::new();
    time::write(&mut out, micros);
    Some(String::from_utf8_lossy(&out).trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_told_as_times() {
        assert_eq!(annotated("  born: 1796013657240585,"), "  born: 1796013657240585,  (2026-11-30T04:40:57.240Z)");
        assert_eq!(annotated("  max_attempts: 3,"), "  max_attempts: 3,");
        assert_eq!(clock(7), "at 7");
    }
}
