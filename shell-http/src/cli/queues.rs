//! `leasehold queues`: looking at queues, and an operator's few acts.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::client::{Call, Client, Pause, Trouble};
use super::status::age;
use super::table::{Align, Cell, Table};
use super::terminal::{Colour, Progress, next_picture, printable};
use super::{Failed, Outage, To, pace, print_line};
use crate::wire::query;

/// Show queues; pause, resume or purge one
#[derive(Args, Debug)]
#[command(after_help = "\
With --json each queue is an object on a line of its own, as in the answer of GET /v1/queues/{queue}; after
a purge with the fields `purged` (all together) and `left`.

Examples:
  leasehold queues
  leasehold queues --watch
  leasehold queues docs --pause --reason 'model is being replaced'
  leasehold queues docs --resume
  leasehold queues docs --purge --status dead

Exit codes: 0 done, 1 refused or unknown, 2 wrong usage, 3 the server cannot be reached.")]
pub struct Queues {
    #[command(flatten)]
    to: To,
    /// One queue only
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Stop claims from the queue
    #[arg(long, requires = "name", conflicts_with_all = ["resume", "purge"])]
    pause: bool,
    /// Why it is paused
    #[arg(long, requires = "pause")]
    reason: Option<String>,
    /// Let claims go on
    #[arg(long, requires = "name", conflicts_with = "purge")]
    resume: bool,
    /// Cancel waiting jobs, or delete ended ones, of the status given
    #[arg(long, requires = "name")]
    purge: bool,
    /// Which jobs to purge
    #[arg(long, requires = "purge", default_value = "queued",
        value_parser = ["scheduled", "held", "queued", "retrying", "succeeded", "dead", "cancelled", "expired"])]
    status: String,
    /// Look again and again, every 2s or as often as said
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
        value_parser = pace, conflicts_with_all = ["pause", "resume", "purge"])]
    watch: Option<Duration>,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

impl Queues {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        if let Some(every) = self.watch {
            return self.watch(&mut client, every).await;
        }
        let path = self.path();
        let queues = if self.pause {
            let body = self.reason.as_ref().map_or(json!({}), |r| json!({"reason": r}));
            json!([client.call(&Call::post(format!("{path}/pause"), body.to_string())).await?.json()?])
        } else if self.resume {
            json!([client.call(&Call::post(format!("{path}/resume"), "")).await?.json()?])
        } else if self.purge {
            json!([self.purge(&mut client, &path).await?])
        } else {
            self.look(&mut client).await?
        };
        print_queues(&queues, self.json).iter().try_for_each(|l| print_line(l))
    }

    fn path(&self) -> String {
        self.name.as_ref().map_or_else(|| "/v1/queues".into(), |name| format!("/v1/queues/{}", query::encode(name)))
    }

    async fn look(&self, client: &mut Client) -> Result<Value, Trouble> {
        let answer = client.call(&Call::get(self.path())).await?.json()?;
        Ok(if self.name.is_some() { json!([answer]) } else { answer["queues"].clone() })
    }

    async fn watch(&self, client: &mut Client, every: Duration) -> Result<(), Failed> {
        let mut outage = Outage::default();
        let mut pause = Pause::new();
        let mut first = true;
        loop {
            match self.look(client).await {
                Ok(queues) => {
                    outage.over();
                    pause = Pause::new();
                    let before = if self.json { String::new() } else { next_picture(first) };
                    first = false;
                    let lines = print_queues(&queues, self.json);
                    if !lines.is_empty() {
                        print_line(&format!("{before}{}", lines.join("\n")))?;
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

    /// Page after page, until nothing is left.
    async fn purge(&self, client: &mut Client, path: &str) -> Result<Value, Failed> {
        let body = json!({"status": self.status}).to_string();
        let mut total = 0;
        let mut progress = Progress::new("purged", None, false);
        loop {
            let mut queue = client.call(&Call::post(format!("{path}/purge"), body.clone())).await?.json()?;
            let purged = queue["purged"].as_u64().unwrap_or(0);
            total += purged;
            progress.add(purged);
            if queue["left"].as_u64().unwrap_or(0) == 0 || purged == 0 {
                progress.clear();
                say!("purged {total}");
                queue["purged"] = total.into();
                return Ok(queue);
            }
        }
    }
}

/// Shown in any case, and only if there is something in them.
const ALWAYS: [&str; 4] = ["queued", "running", "succeeded", "dead"];
const COLUMNS: [&str; 9] =
    ["queued", "running", "retrying", "scheduled", "held", "succeeded", "dead", "cancelled", "expired"];

/// Queues as lines: JSON, or a table without the columns in which nothing stands.
pub fn print_queues(queues: &Value, as_json: bool) -> Vec<String> {
    let queues = queues.as_array().map(Vec::as_slice).unwrap_or_default();
    if as_json {
        return queues.iter().map(Value::to_string).collect();
    }
    if queues.is_empty() {
        return vec!["no queues: a queue is there from the first job on that is submitted to it".into()];
    }
    let count = |queue: &Value, status: &str| queue["counts"][status].as_u64().unwrap_or(0);
    let shown: Vec<&'static str> =
        COLUMNS.into_iter().filter(|c| ALWAYS.contains(c) || queues.iter().any(|queue| count(queue, c) > 0)).collect();
    let mut columns = vec![("queue", Align::Left)];
    columns.extend(shown.iter().map(|c| (*c, Align::Right)));
    columns.extend([("oldest", Align::Right), ("", Align::Left)]);
    let mut table = Table::new(columns);
    for queue in queues {
        let mut row = vec![Cell::plain(printable(queue["name"].as_str().unwrap_or_default()))];
        row.extend(shown.iter().map(|status| match count(queue, status) {
            0 => Cell("0".into(), Colour::Dim),
            n => Cell(n.to_string(), Colour::of_status(status)),
        }));
        row.push(Cell::plain(age(queue)));
        let paused = match (&queue["paused"], queue["pause_reason"].as_str()) {
            (Value::Bool(true), Some(reason)) => format!("paused: {}", printable(reason)),
            (Value::Bool(true), None) => "paused".into(),
            _ => String::new(),
        };
        row.push(Cell(paused, Colour::Yellow));
        table.row(row);
    }
    table.lines()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_what_is_there() {
        let queues = json!([
            {"name": "a\u{1b}", "counts": {"queued": 12, "retrying": 1}, "oldest_age_ms": 61_000, "paused": false},
            {"name": "longer", "counts": {"dead": 3}, "paused": true, "pause_reason": "why"},
        ]);
        let expected = [
            "queue   queued  running  retrying  succeeded  dead  oldest",
            "a\u{fffd}          12        0         1          0     0   1m 1s",
            "longer       0        0         0          0     3          paused: why",
        ];
        assert_eq!(print_queues(&queues, false), expected);
        assert_eq!(print_queues(&queues, true).len(), 2);
    }
}
