//! `leasehold status`, `cancel`, `queues`, `events`: looking, and an operator's few acts.

use clap::Args;
use serde_json::{Value, json};

use super::client::{Call, Client, Pause, Refused, Trouble};
use super::{Failed, Outage, To, print_line, printable};
use crate::wire::query;

/// Show jobs by their ids; without ids, what the queues hold
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  leasehold status
  leasehold status 01J8ZQ3V9K007Q4M2X5N6P7R8S
  leasehold status --json 01J8ZQ3V9K007Q4M2X5N6P7R8S

Exit codes: 0 all were found, 1 not all, or the server cannot be reached.")]
pub struct Status {
    #[command(flatten)]
    to: To,
    /// Jobs
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
}

/// Cancel jobs by their ids
#[derive(Args, Debug)]
#[command(after_help = "Exit codes: 0 all are cancelled, 1 not all.")]
pub struct Cancel {
    #[command(flatten)]
    to: To,
    /// Jobs
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
}

/// Show queues; pause, resume or purge one
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  leasehold queues
  leasehold queues docs --pause --reason 'model is being replaced'
  leasehold queues docs --resume
  leasehold queues docs --purge --status dead")]
pub struct Queues {
    #[command(flatten)]
    to: To,
    /// One queue only
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
    #[arg(long, requires = "purge", default_value = "queued")]
    status: String,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
}

/// Print what has happened
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  leasehold events --limit 20
  leasehold events --follow --json")]
pub struct Events {
    #[command(flatten)]
    to: To,
    /// Only what came after the event with this id
    #[arg(long, value_name = "ID")]
    after: Option<String>,
    /// Print at most so many and end
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Go on printing what happens
    #[arg(long, short)]
    follow: bool,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
}

/// Events asked for at once.
const PAGE: u64 = 1_000;

impl Status {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        if self.ids.is_empty() {
            let queues = client.call(&Call::get("/v1/queues")).await?.json()?;
            return print_queues(&queues["queues"], self.json);
        }
        each(&mut client, &self.ids, self.json, |id| Call::get(format!("/v1/jobs/{id}"))).await
    }
}

impl Cancel {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        each(&mut client, &self.ids, self.json, |id| Call::post(format!("/v1/jobs/{id}/cancel"), "")).await
    }
}

/// Makes a call for every job and prints the job.
async fn each(client: &mut Client, ids: &[String], json: bool, call: impl Fn(&str) -> Call) -> Result<(), Failed> {
    let mut failed = false;
    for id in ids {
        match client.call(&call(&query::encode(id))).await {
            Ok(answer) => print_job(&answer.json()?, json)?,
            Err(Trouble::Refused(Refused { code, detail, .. })) => {
                eprintln!("leasehold: {}: {code}: {}", printable(id), printable(&detail));
                failed = true;
            }
            Err(trouble) => return Err(trouble.into()),
        }
    }
    if failed { Err(Failed::Quietly) } else { Ok(()) }
}

fn print_job(job: &Value, as_json: bool) -> Result<(), Failed> {
    if as_json {
        return print_line(&job.to_string());
    }
    let text = |value: &Value| match value {
        Value::String(text) => printable(text),
        Value::Null => String::new(),
        other => printable(&other.to_string()),
    };
    print_line(&format!("{}  {}", text(&job["id"]), text(&job["status"])))?;
    for field in [
        "queue",
        "class",
        "attempt",
        "max_attempts",
        "deliveries",
        "created_at",
        "run_at",
        "ended_at",
        "reason",
        "position",
        "progress",
        "idempotency_key",
        "payload_bytes",
    ] {
        if !job[field].is_null() {
            print_line(&format!("  {field:<16} {}", text(&job[field])))?;
        }
    }
    if job["lease"].is_object() {
        let (worker, until) = (text(&job["lease"]["worker"]), text(&job["lease"]["expires_at"]));
        print_line(&format!("  {:<16} {worker} until {until}", "lease"))?;
    }
    for attempt in job["attempts"].as_array().into_iter().flatten() {
        let (when, how, who) = (text(&attempt["ended_at"]), text(&attempt["outcome"]), text(&attempt["worker"]));
        let message = text(&attempt["error"]["message"]);
        print_line(&format!("  {:<16} {when} {how} {who} {message}", "attempt"))?;
    }
    Ok(())
}

impl Queues {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let Some(name) = &self.name else {
            let queues = client.call(&Call::get("/v1/queues")).await?.json()?;
            return print_queues(&queues["queues"], self.json);
        };
        let path = format!("/v1/queues/{}", query::encode(name));
        let queue = if self.pause {
            let body = self.reason.as_ref().map_or(json!({}), |r| json!({"reason": r}));
            client.call(&Call::post(format!("{path}/pause"), body.to_string())).await?.json()?
        } else if self.resume {
            client.call(&Call::post(format!("{path}/resume"), "")).await?.json()?
        } else if self.purge {
            self.purge(&mut client, &path).await?
        } else {
            client.call(&Call::get(path)).await?.json()?
        };
        print_queues(&json!([queue]), self.json)
    }

    /// Page after page, until nothing is left.
    async fn purge(&self, client: &mut Client, path: &str) -> Result<Value, Failed> {
        let body = json!({"status": self.status}).to_string();
        let mut total = 0;
        loop {
            let queue = client.call(&Call::post(format!("{path}/purge"), body.clone())).await?.json()?;
            let purged = queue["purged"].as_u64().unwrap_or(0);
            total += purged;
            if queue["left"].as_u64().unwrap_or(0) == 0 || purged == 0 {
                eprintln!("purged {total}");
                return Ok(queue);
            }
        }
    }
}

fn print_queues(queues: &Value, as_json: bool) -> Result<(), Failed> {
    let queues = queues.as_array().map(Vec::as_slice).unwrap_or_default();
    if as_json {
        return queues.iter().try_for_each(|q| print_line(&q.to_string()));
    }
    let names: Vec<String> = queues.iter().map(|q| printable(q["name"].as_str().unwrap_or_default())).collect();
    let wide = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).max(5);
    let columns = ["queued", "running", "retrying", "scheduled", "succeeded", "dead", "cancelled", "expired"];
    let titles: String = columns.iter().map(|c| format!(" {c:>10}")).collect();
    print_line(&format!("{:<wide$}{titles}", "queue"))?;
    for (queue, name) in queues.iter().zip(&names) {
        let counts: String =
            columns.iter().map(|c| format!(" {:>10}", queue["counts"][c].as_u64().unwrap_or(0))).collect();
        let paused = match (&queue["paused"], queue["pause_reason"].as_str()) {
            (Value::Bool(true), Some(reason)) => format!("  paused: {}", printable(reason)),
            (Value::Bool(true), None) => "  paused".into(),
            _ => String::new(),
        };
        print_line(&format!("{name:<wide$}{counts}{paused}"))?;
    }
    Ok(())
}

impl Events {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let mut after = self.after.clone();
        let mut left = self.limit.unwrap_or(u64::MAX);
        let mut outage = Outage::default();
        let mut pause = Pause::new();
        while left > 0 {
            let from = after.as_ref().map(|a| format!("&after={}", query::encode(a))).unwrap_or_default();
            let wait_ms = if self.follow { 20_000 } else { 0 };
            let mut call = Call::get(format!("/v1/events?limit={}&wait_ms={wait_ms}{from}", left.min(PAGE)));
            call.wait = std::time::Duration::from_millis(wait_ms);
            let answer = match client.call(&call).await {
                Ok(answer) => answer.json()?,
                Err(Trouble::Refused(refused)) => return Err(refused.into()),
                Err(trouble) if self.follow => {
                    outage.trouble(&trouble);
                    pause.wait(&trouble).await;
                    continue;
                }
                Err(trouble) => return Err(trouble.into()),
            };
            outage.over();
            pause = Pause::new();
            let events = answer["events"].as_array().map(Vec::as_slice).unwrap_or_default();
            for event in events {
                self.print(event)?;
                left -= 1;
            }
            if events.is_empty() && !self.follow {
                break;
            }
            after = answer["next"].as_str().map(str::to_owned).or(after);
        }
        Ok(())
    }

    fn print(&self, event: &Value) -> Result<(), Failed> {
        if self.json {
            return print_line(&event.to_string());
        }
        let text = |key: &str| printable(event[key].as_str().unwrap_or("-"));
        let (at, id, kind, job) = (text("at"), text("id"), text("type"), text("job"));
        let (queue, worker, reason) = (text("queue"), text("worker"), text("reason"));
        print_line(&format!("{at} {id:>10} {kind:<18} {job} {queue} {worker} {reason}"))
    }
}
