//! `leasehold status` and `cancel`: jobs.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::client::{Call, Client, Pause, Trouble};
use super::queues::print_queues;
use super::table::{Align, Cell, Table, span};
use super::terminal::{Colour, next_picture, printable};
use super::{Failed, Outage, To, pace, print_line};
use crate::wire::query;

const STATUSES: [&str; 9] =
    ["scheduled", "held", "queued", "running", "retrying", "succeeded", "dead", "cancelled", "expired"];
/// Jobs asked for at once.
const PAGE: u64 = 1_000;

/// Show jobs by their ids, or those of a queue; without either, what the queues hold
#[derive(Args, Debug)]
#[command(after_help = "\
With --json each job is an object on a line of its own, as in the answer of GET /v1/jobs/{id}; one that
cannot be shown is {\"id\": …, \"problem\": {\"status\", \"code\", \"detail\"}}.

--watch looks again and again: on a terminal in place, else one picture after the other. It ends when all
the jobs that were asked for by their ids have ended.

Examples:
  leasehold status
  leasehold status 01J8ZQ3V9K007Q4M2X5N6P7R8S
  leasehold status --queue docs --status dead --limit 20
  leasehold status --watch=5s
  leasehold status --json 01J8ZQ3V9K007Q4M2X5N6P7R8S

Exit codes: 0 all were found, 1 not all, 2 wrong usage, 3 the server cannot be reached.")]
pub struct Status {
    #[command(flatten)]
    to: To,
    /// Jobs
    #[arg(value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    ids: Vec<String>,
    /// The jobs of this queue
    #[arg(long, conflicts_with = "ids")]
    queue: Option<String>,
    /// Jobs in this status
    #[arg(long, conflicts_with = "ids", value_parser = STATUSES)]
    status: Option<String>,
    /// At most so many jobs
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Look again and again, every 2s or as often as said
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
        value_parser = pace)]
    watch: Option<Duration>,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

/// Cancel jobs by their ids
#[derive(Args, Debug)]
#[command(after_help = "\
A job that waits is cancelled at once and for good. If it runs, its worker is told at the next heartbeat.

Examples:
  leasehold cancel 01J8ZQ3V9K007Q4M2X5N6P7R8S
  leasehold status --queue docs --status queued --json | jq -r .id | xargs -r leasehold cancel

Exit codes: 0 all are cancelled, 1 not all (ended otherwise, or unknown), 2 wrong usage, 3 the server
cannot be reached.")]
pub struct Cancel {
    #[command(flatten)]
    to: To,
    /// Jobs
    #[arg(required = true, value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    ids: Vec<String>,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

impl Status {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let Some(every) = self.watch else {
            let (lines, looked) = self.look(&mut client).await?;
            lines.iter().try_for_each(|l| print_line(l))?;
            return if looked.failed { Err(Failed::Quietly) } else { Ok(()) };
        };
        let mut outage = Outage::default();
        let mut pause = Pause::new();
        let mut first = true;
        loop {
            match self.look(&mut client).await {
                Ok((lines, looked)) => {
                    outage.over();
                    pause = Pause::new();
                    let before = if self.json { String::new() } else { next_picture(first) };
                    first = false;
                    print_line(&format!("{before}{}", lines.join("\n")))?;
                    if !self.ids.is_empty() && looked.all_ended {
                        return if looked.failed { Err(Failed::Quietly) } else { Ok(()) };
                    }
                    tokio::time::sleep(every.max(Duration::from_millis(100))).await;
                }
                Err(Trouble::Refused(refused)) => return Err(refused.into()),
                Err(trouble) => {
                    outage.trouble(&trouble);
                    pause.wait(&trouble).await;
                }
            }
        }
    }

    async fn look(&self, client: &mut Client) -> Result<(Vec<String>, Looked), Trouble> {
        if !self.ids.is_empty() {
            return each(client, &self.ids, self.json, |id| Call::get(format!("/v1/jobs/{id}"))).await;
        }
        let lines = if self.queue.is_some() || self.status.is_some() {
            self.list(client).await?
        } else {
            let answer = client.call(&Call::get("/v1/queues")).await?.json()?;
            print_queues(&answer["queues"], self.json)
        };
        Ok((lines, Looked { failed: false, all_ended: false }))
    }

    async fn list(&self, client: &mut Client) -> Result<Vec<String>, Trouble> {
        let mut jobs: Vec<Value> = Vec::new();
        let mut cursor = String::new();
        loop {
            let left = self.limit.saturating_sub(jobs.len() as u64);
            if left == 0 {
                break;
            }
            let mut path = format!("/v1/jobs?limit={}{cursor}", left.min(PAGE));
            for (name, value) in [("queue", &self.queue), ("status", &self.status)] {
                if let Some(value) = value {
                    path.push_str(&format!("&{name}={}", query::encode(value)));
                }
            }
            let answer = client.call(&Call::get(path)).await?.json()?;
            jobs.extend(answer["jobs"].as_array().cloned().unwrap_or_default());
            match answer["next"].as_str() {
                Some(next) => cursor = format!("&cursor={}", query::encode(next)),
                None => break,
            }
        }
        Ok(if self.json { jobs.iter().map(Value::to_string).collect() } else { job_table(&jobs) })
    }
}

impl Cancel {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let call = |id: &str| Call::post(format!("/v1/jobs/{id}/cancel"), "");
        let (lines, looked) = each(&mut client, &self.ids, self.json, call).await?;
        lines.iter().try_for_each(|l| print_line(l))?;
        if looked.failed { Err(Failed::Quietly) } else { Ok(()) }
    }
}

/// What came of looking at several jobs.
#[derive(Clone, Copy, Debug)]
struct Looked {
    failed: bool,
    all_ended: bool,
}

/// Makes a call for every job and shows the job.
async fn each(
    client: &mut Client,
    ids: &[String],
    as_json: bool,
    call: impl Fn(&str) -> Call,
) -> Result<(Vec<String>, Looked), Trouble> {
    let mut looked = Looked { failed: false, all_ended: true };
    let mut lines = Vec::new();
    for id in ids {
        match client.call(&call(&query::encode(id))).await {
            Ok(answer) => {
                let job = answer.json()?;
                looked.all_ended &=
                    matches!(job["status"].as_str(), Some("succeeded" | "dead" | "cancelled" | "expired"));
                lines.extend(if as_json { vec![job.to_string()] } else { job_lines(&job) });
            }
            Err(Trouble::Refused(refused)) => {
                looked.failed = true;
                if as_json {
                    lines.push(json!({"id": id, "problem": refused.json()}).to_string());
                }
                let (code, detail) = (printable(&refused.code), printable(&refused.detail));
                say!("{}: {code}: {detail}", printable(id));
            }
            Err(trouble) => return Err(trouble),
        }
    }
    Ok((lines, looked))
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => printable(text),
        Value::Null => String::new(),
        other => printable(&other.to_string()),
    }
}

fn status_cell(job: &Value) -> Cell {
    let status = text(&job["status"]);
    let colour = Colour::of_status(&status);
    Cell(status, colour)
}

fn job_table(jobs: &[Value]) -> Vec<String> {
    let left = ["id", "queue", "class", "status"].map(|t| (t, Align::Left));
    let rest = [("attempt", Align::Right), ("due", Align::Left), ("note", Align::Left)];
    let mut table = Table::new(left.into_iter().chain(rest).collect());
    for job in jobs {
        let last = job["attempts"].as_array().and_then(|a| a.last());
        let note = [&job["reason"], &job["lease"]["worker"]].map(text).into_iter().find(|t| !t.is_empty());
        let error = last.map(|a| text(&a["error"]["message"])).unwrap_or_default();
        let note = [note.unwrap_or_default(), short(&error)].join(" ");
        table.row(vec![
            Cell::plain(text(&job["id"])),
            Cell::plain(text(&job["queue"])),
            Cell::plain(text(&job["class"])),
            status_cell(job),
            Cell::plain(format!("{}/{}", text(&job["attempt"]), text(&job["max_attempts"]))),
            Cell::plain(text(&job["run_at"])),
            Cell::plain(note.trim()),
        ]);
    }
    table.lines()
}

/// An error's beginning.
fn short(error: &str) -> String {
    const CHARS: usize = 60;
    match error.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", &error[..end]),
        None => error.to_owned(),
    }
}

fn job_lines(job: &Value) -> Vec<String> {
    let status = status_cell(job);
    let mut lines = vec![format!("{}  {}", Colour::Bold.paint(&text(&job["id"])), status.1.paint(&status.0))];
    let mut field = |name: &str, value: String| lines.push(format!("  {name:<16} {value}"));
    field("queue", format!("{} ({})", text(&job["queue"]), text(&job["class"])));
    let deliveries = match job["deliveries"].as_u64().unwrap_or(0) {
        n if Some(n) == job["attempt"].as_u64() => String::new(),
        n => format!(", handed out {n} times"),
    };
    field("attempt", format!("{} of {}{deliveries}", text(&job["attempt"]), text(&job["max_attempts"])));
    for name in ["created_at", "run_at", "ended_at", "reason", "position", "progress", "idempotency_key", "metadata"] {
        if !job[name].is_null() {
            field(name, text(&job[name]));
        }
    }
    if let Some(bytes) = job["payload_bytes"].as_u64() {
        field("payload", format!("{bytes} bytes"));
    }
    if job["lease"].is_object() {
        field("lease", format!("{} until {}", text(&job["lease"]["worker"]), text(&job["lease"]["expires_at"])));
    }
    let omitted = job["attempts_omitted"].as_u64().unwrap_or(0);
    for attempt in job["attempts"].as_array().into_iter().flatten() {
        let outcome = text(&attempt["outcome"]);
        let colour = Colour::of_status(&outcome);
        let (when, who) = (text(&attempt["ended_at"]), text(&attempt["worker"]));
        let message = text(&attempt["error"]["message"]);
        let line = format!("{when} {} by {who} {message}", colour.paint(&outcome));
        field(&format!("delivery {}", text(&attempt["delivery"])), line.trim_end().to_owned());
    }
    if omitted > 0 {
        field("", format!("({omitted} more between the first and the last)"));
    }
    lines
}

/// How long the oldest has waited, as people say it.
pub fn age(queue: &Value) -> String {
    queue["oldest_age_ms"].as_u64().map(span).unwrap_or_default()
}
