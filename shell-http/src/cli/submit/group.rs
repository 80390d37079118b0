//! `leasehold submit --group`: all files and lines as the children of one group.
//!
//! The group is created open, filled by pages and sealed, each under a name that makes a repeat harmless: the
//! key of the group, the index of a page's first child. So a run that broke off is gone on with by the same
//! command.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::read::{Body, Item, Options, Reader};
use super::{Done, Failed, Submit, Tally};
use crate::cli::Outage;
use crate::cli::client::{Call, Client};
use crate::cli::signals::Signals;
use crate::cli::terminal::{Progress, printable};
use crate::wire::query;

/// Children of one page, and bytes after which it is sent.
const PAGE: usize = 500;
const PAGE_BYTES: usize = 4 * 1024 * 1024;
/// One look waits so long for the group's end.
const LOOK_MS: u64 = 1_000;
/// Children looked at in one call when results are fetched.
const CHILDREN: usize = 500;

/// A group on its way.
struct Group {
    client: Client,
    outage: Outage,
    patience: Duration,
    id: String,
    /// By index.
    names: Vec<String>,
}

impl Group {
    async fn ask(&mut self, call: &Call) -> Result<Value, Failed> {
        let outage = &mut self.outage;
        let answer = self.client.insist(call, Some(self.patience), &mut |t| outage.trouble(t)).await;
        self.outage.over();
        Ok(answer.and_then(|a| a.json())?)
    }

    fn path(&self, tail: &str) -> String {
        format!("/v1/groups/{}{tail}", query::encode(&self.id))
    }
}

impl Submit {
    pub(super) async fn run_group(&self, prefix: &str, signals: &mut Signals) -> Result<(), Failed> {
        let mut tally = Tally::default();
        let mut group = Group {
            client: Client::new(self.to.server.clone()),
            outage: Outage::default(),
            patience: self.retry_for,
            id: String::new(),
            names: Vec::new(),
        };
        let done = tokio::select! {
            done = self.group(prefix, &mut group, &mut tally) => done,
            number = signals.next() => Err(Failed::Signal { number, why: "interrupted".into() }),
        };
        done.map_err(|failed| {
            let what = match group.id.as_str() {
                "" => "nothing was submitted".into(),
                id => format!("the group {id} is there with {} children so far", group.names.len()),
            };
            let more = format!("{what}. The same command with --key-prefix {prefix} goes on where this one ended.");
            self.with(failed, &more)
        })
    }

    async fn group(&self, prefix: &str, group: &mut Group, tally: &mut Tally) -> Result<(), Failed> {
        // Anything that cannot be read is said before there is a group.
        for file in self.files.iter().filter(|f| f.as_os_str() != "-") {
            std::fs::File::open(file).map_err(|e| Failed::Because(format!("{}: {e}", file.display())))?;
        }
        let mut body = json!({"queue": self.queue, "sealed": false, "children": []});
        let mode = if self.fail_fast { "fail_fast" } else { "collect_all" };
        body["mode"] = mode.into();
        if let Some(n) = self.max_parallel {
            body["max_parallel"] = n.into();
        }
        if let Some(class) = &self.class {
            body["class"] = class.as_str().into();
        }
        if let Some(n) = self.max_attempts {
            body["max_attempts"] = n.into();
        }
        let mut create = Call::post("/v1/groups", body.to_string());
        create.key = Some(format!("{prefix}/group"));
        let created = group.ask(&create).await?;
        group.id = created["id"].as_str().unwrap_or_default().to_owned();
        self.fill(prefix, group).await?;
        let sealed = group.ask(&Call::post(group.path("/seal"), "")).await?;
        if !self.wait {
            return self.print_group(&sealed, tally);
        }
        let end = self.wait_for_group(group).await?;
        self.fetch(group, tally).await?;
        self.print_group(&end, tally)?;
        match end["status"].as_str() {
            Some("succeeded") => Ok(()),
            // The group that was printed says so, too.
            other => {
                say!("the group ended {}", printable(other.unwrap_or("unknown")));
                Err(Failed::Quietly)
            }
        }
    }

    /// Sends everything that is read, page by page.
    async fn fill(&self, prefix: &str, group: &mut Group) -> Result<(), Failed> {
        let (done, mut refused) = mpsc::channel::<Done>(1);
        let options = Options {
            queue: self.queue.clone(),
            prefix: prefix.to_owned(),
            class: None,
            delay_ms: None,
            max_attempts: None,
            content_type: self.content_type.clone(),
            child: true,
        };
        let mut items = Reader { files: self.files.clone(), options }.start(done)?;
        let only_files = self.files.iter().all(|f| f.as_os_str() != "-");
        let mut progress = Progress::new("submitted", only_files.then_some(self.files.len() as u64), self.quiet);
        let mut page: VecDeque<Item> = VecDeque::new();
        let mut bytes = 0;
        loop {
            let item = items.recv().await;
            if let Ok(Done::Job { name, id: Err(problem) }) = refused.try_recv() {
                progress.clear();
                let _ = group.ask(&Call::post(group.path("/cancel"), "")).await;
                let why = format!("{}: {}; the group is cancelled", printable(&name), printable(&problem.text()));
                return Err(Failed::Because(why));
            }
            let over = item.is_none();
            if let Some(item) = item {
                bytes += item.len();
                page.push_back(item);
            }
            if page.len() >= PAGE || bytes >= PAGE_BYTES || over && !page.is_empty() {
                self.send_page(group, &page).await?;
                for item in page.drain(..) {
                    group.names.push(item.name);
                    progress.count(true);
                }
                bytes = 0;
            }
            if over {
                progress.end();
                return Ok(());
            }
        }
    }

    async fn send_page(&self, group: &mut Group, page: &VecDeque<Item>) -> Result<(), Failed> {
        let mut body = format!("{{\"from\":{},\"children\":[", group.names.len()).into_bytes();
        for (n, item) in page.iter().enumerate() {
            if n > 0 {
                body.push(b',');
            }
            match &item.body {
                Body::Json(json) => body.extend_from_slice(json),
                // Never: children are read as JSON.
                Body::Raw { .. } => return Err(Failed::Because(format!("{}: is too large", printable(&item.name)))),
            }
        }
        body.extend_from_slice(b"]}");
        group.ask(&Call::post(group.path("/children"), body)).await.map(drop)
    }

    async fn wait_for_group(&self, group: &mut Group) -> Result<Value, Failed> {
        let total = group.names.len() as u64;
        let mut progress = Progress::new("ended", Some(total), self.quiet);
        let mut call = Call::get(group.path(&format!("?wait_ms={LOOK_MS}")));
        call.wait = Duration::from_millis(LOOK_MS);
        loop {
            let seen = group.ask(&call).await?;
            let count = |name: &str| seen["counts"][name].as_u64().unwrap_or(0);
            let failed = ["dead", "cancelled", "expired", "lost"].map(count).iter().sum::<u64>();
            let note = format!("{} in flight, {} held", count("in_flight"), count("held"));
            progress.show(count("succeeded") + failed, failed, note);
            if seen["ended_at"].is_string() {
                progress.end();
                return Ok(seen);
            }
        }
    }

    /// Prints what did not succeed, and writes the results.
    async fn fetch(&self, group: &mut Group, tally: &mut Tally) -> Result<(), Failed> {
        let mut progress = Progress::new("fetched", Some(group.names.len() as u64), self.quiet);
        let names = std::mem::take(&mut group.names);
        let mut cursor = Some("i0".to_owned());
        while let Some(from) = cursor {
            let page = group.ask(&Call::get(group.path(&format!("/children?limit={CHILDREN}&cursor={from}")))).await?;
            for child in page["children"].as_array().into_iter().flatten() {
                let index = child["index"].as_u64().and_then(|n| usize::try_from(n).ok());
                let name = index.and_then(|n| names.get(n)).map_or("?", String::as_str);
                let id = child["id"].as_str().unwrap_or_default();
                let status = child["status"].as_str().unwrap_or_default();
                let why = match status {
                    "succeeded" => self.result(&mut group.client, name, id).await?,
                    _ => Some(child["error"]["message"].as_str().or(child["reason"].as_str()).unwrap_or("").to_owned()),
                };
                progress.count(why.is_none());
                if let Some(why) = why {
                    tally.failed += 1;
                    progress.clear();
                    say!("{}: {status}: {}", printable(name), printable(&why));
                }
            }
            cursor = page["next"].as_str().map(str::to_owned);
        }
        progress.end();
        Ok(())
    }

    fn print_group(&self, group: &Value, tally: &mut Tally) -> Result<(), Failed> {
        let text = |name: &str| group[name].as_str().unwrap_or_default();
        let line = match self.json {
            true => group.to_string(),
            false => format!("{}\tgroup of {}\t{}", text("id"), group["children"], text("status")),
        };
        self.line(&line, tally)
    }
}
