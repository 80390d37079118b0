//! `leasehold audit`: the books of a whole store.

use clap::Args;
use leasehold_core::Request;
use serde_json::{Value, json};

use super::books::{Books, Where};
use super::client::Call;
use super::terminal::{Colour, Progress, printable};
use super::{Failed, print_line};
use crate::wire::query;

/// What one repair puts back can show what else is wrong: so many times, at most.
const PASSES: usize = 4;

/// Check that the books of a store balance
#[derive(Args, Debug)]
#[command(after_help = "\
Every record is checked against the places that it implies, and every place against its record. A live
store is checked a page at a time, each page of one moment, so that nothing is reported that is only under
way. A stopped one is opened as a server would open it, under its lock; without --repair nothing that it
holds is changed.

With --repair what can be derived from the records is put right, as the server's own scrub does it in the
course of time; then the books are checked once more, and that check decides.

With --json each finding is an object on a line of its own, {\"subject\", \"what\", \"repaired\"}, and the last
line is {\"at\", \"records\", \"jobs\", \"entries\", \"quarantined\", \"findings\", \"repaired\", \"balances\"}.

Examples:
  leasehold audit
  leasehold audit --store disk:/var/lib/leasehold
  leasehold audit --store disk:/var/lib/leasehold --repair --json

Exit codes: 0 the books balance, 1 they do not, or the store cannot be opened, 2 wrong usage, 3 the server
cannot be reached.")]
pub struct Audit {
    #[command(flatten)]
    place: Where,
    /// Put right what can be derived
    #[arg(long)]
    repair: bool,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Default)]
struct Seen {
    at: Value,
    records: u64,
    jobs: u64,
    entries: u64,
    quarantined: u64,
    findings: u64,
    repaired: u64,
}

impl Audit {
    pub async fn run(self) -> Result<(), Failed> {
        let mut books = self.place.open(self.repair).await?;
        let seen = self.check(&mut books).await;
        books.close();
        let seen = seen?;
        let balances = seen.findings == 0;
        if self.json {
            print_line(
                &json!({
                    "at": seen.at, "records": seen.records, "jobs": seen.jobs, "entries": seen.entries,
                    "quarantined": seen.quarantined, "findings": seen.findings, "repaired": seen.repaired,
                    "balances": balances,
                })
                .to_string(),
            )?;
        } else {
            let repaired = if self.repair { format!(", {} repaired", seen.repaired) } else { String::new() };
            print_line(&format!(
                "{} records of {} jobs, {} places, {} in quarantine{repaired}: {}",
                seen.records,
                seen.jobs,
                seen.entries,
                seen.quarantined,
                if balances {
                    Colour::Green.paint("the books balance")
                } else {
                    Colour::Red.paint(&format!("{} findings, the books do not balance", seen.findings))
                },
            ))?;
        }
        if balances { Ok(()) } else { Err(Failed::Quietly) }
    }

    /// The last pass decides; those before it repair.
    async fn check(&self, books: &mut Books) -> Result<Seen, Failed> {
        let mut repaired = 0;
        if self.repair {
            for _ in 0..PASSES {
                let pass = self.pass(books, true).await?;
                repaired += pass.repaired;
                if pass.repaired == 0 {
                    break;
                }
            }
        }
        Ok(Seen { repaired, ..self.pass(books, false).await? })
    }

    async fn pass(&self, books: &mut Books, repair: bool) -> Result<Seen, Failed> {
        let mut seen = Seen::default();
        let mut cursor: Option<String> = None;
        let mut progress = Progress::new("records and places looked at", None, self.quiet);
        loop {
            let from = cursor.as_ref().map(|c| format!("?cursor={}", query::encode(c))).unwrap_or_default();
            let call = match repair {
                true => Call::post(format!("/v1/audit:repair{from}"), ""),
                false => Call::get(format!("/v1/audit{from}")),
            };
            let page = books.ask(&call, Request::Audit { cursor: cursor.clone(), repair }).await?;
            let number = |name: &str| page[name].as_u64().unwrap_or(0);
            seen.at = page["at"].clone();
            seen.records += number("records");
            seen.jobs += number("jobs");
            seen.entries += number("entries");
            seen.quarantined += number("quarantined");
            for finding in page["findings"].as_array().into_iter().flatten() {
                let is_repaired = finding["repaired"] == true;
                seen.findings += 1;
                seen.repaired += u64::from(is_repaired);
                // What a repair could not mend comes again in the check after it.
                if !repair || is_repaired {
                    progress.clear();
                    self.print(finding)?;
                }
            }
            progress.add(number("records") + number("entries"));
            match page["next"].as_str() {
                Some(next) => cursor = Some(next.to_owned()),
                None => {
                    progress.clear();
                    return Ok(seen);
                }
            }
        }
    }

    fn print(&self, finding: &Value) -> Result<(), Failed> {
        if self.json {
            return print_line(&finding.to_string());
        }
        let text = |name: &str| printable(finding[name].as_str().unwrap_or_default());
        let repaired = if finding["repaired"] == true { " (repaired)" } else { "" };
        print_line(&format!("{}  {}{}", text("subject"), text("what"), Colour::Green.paint(repaired)))
    }
}
