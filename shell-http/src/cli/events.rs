//! `leasehold events`: what has happened.

use std::time::Duration;

use clap::Args;
use serde_json::Value;

use super::client::{Call, Client, Pause, Trouble};
use super::terminal::{Colour, printable};
use super::{Failed, Outage, To, print_line};
use crate::wire::query;

/// Print what has happened, and go on printing with --follow
#[derive(Args, Debug)]
#[command(after_help = "\
Events come in the order in which they happened, each once. --follow waits for more and survives restarts
of the server: it asks again from the last event that it has printed. To go on later where this one ended,
give the last event's `id` as --after.

With --json each event is an object on a line of its own, as in the answer of GET /v1/events.

Examples:
  leasehold events --limit 20
  leasehold events --follow
  leasehold events --follow --json --after 1832-1 >> audit.ndjson

Exit codes: 0 printed, 1 refused, 2 wrong usage, 3 the server cannot be reached.")]
pub struct Events {
    #[command(flatten)]
    to: To,
    /// Only what came after the event with this id
    #[arg(long, value_name = "ID")]
    after: Option<String>,
    /// Print at most so many and end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Go on printing what happens
    #[arg(long, short)]
    follow: bool,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

/// Events asked for at once.
const PAGE: u64 = 1_000;

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
            call.wait = Duration::from_millis(wait_ms);
            let answer = match client.call(&call).await.and_then(|a| a.json()) {
                Ok(answer) => answer,
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
        let text = |key: &str| printable(event[key].as_str().unwrap_or_default());
        let (at, id, kind) = (text("at"), text("id"), text("type"));
        // A group's event has no job.
        let of = if event["job"].is_null() { text("group") } else { text("job") };
        let colour = Colour::of_status(kind.split('.').next_back().unwrap_or_default());
        let kind = colour.paint(&format!("{kind:<18}"));
        let more: Vec<String> = ["queue", "worker", "reason"].map(text).into_iter().filter(|t| !t.is_empty()).collect();
        print_line(&format!("{at} {id:>10} {kind} {of} {}", more.join(" ")))
    }
}
