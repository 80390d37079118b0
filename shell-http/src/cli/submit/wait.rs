//! Waiting for jobs and fetching their results.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::{Failed, Submit, Tally};
use crate::cli::Outage;
use crate::cli::client::{Call, Client, Trouble};
use crate::cli::signals::Signals;
use crate::cli::terminal::{Progress, printable};
use crate::wire::query;

/// Jobs that are looked at in one round of waiting, oldest first.
const WINDOW: usize = 64;
const ROUND_MIN: Duration = Duration::from_millis(100);
const ROUND_MAX: Duration = Duration::from_secs(2);

impl Submit {
    /// Waits for every job and counts those that did not succeed.
    pub(super) async fn wait_for(
        &self,
        tally: &mut Tally,
        signals: &mut Signals,
        go_on: &dyn Fn() -> String,
    ) -> Result<(), Failed> {
        let jobs = std::mem::take(&mut tally.jobs);
        let total = jobs.len() as u64;
        let mut progress = Progress::new("ended", Some(total), self.quiet);
        let ended = tokio::select! {
            ended = self.rounds(jobs, tally, &mut progress) => ended,
            number = signals.next() => Err(Failed::Signal { number, why: "interrupted".into() }),
        };
        if ended.is_ok() {
            progress.end();
        } else {
            progress.clear();
        }
        ended.map_err(|failed| {
            let more = format!(
                "all {total} jobs are submitted and go on by themselves; {} have ended. {}",
                progress.done(),
                go_on()
            );
            self.with(failed, &more)
        })
    }

    async fn rounds(
        &self,
        jobs: Vec<(String, String)>,
        tally: &mut Tally,
        progress: &mut Progress,
    ) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let mut outage = Outage::default();
        let mut round = ROUND_MIN;
        let mut left: VecDeque<_> = jobs.into();
        while !left.is_empty() {
            let mut moved = false;
            for _ in 0..left.len().min(WINDOW) {
                let Some((name, id)) = left.pop_front() else { break };
                let call = Call::get(format!("/v1/jobs/{}", query::encode(&id)));
                let answer = client.insist(&call, Some(self.retry_for), &mut |t| outage.trouble(t)).await;
                outage.over();
                let job = match answer.and_then(|a| a.json()) {
                    Ok(job) => job,
                    Err(Trouble::Refused(refused)) => json!({"status": "gone", "reason": refused.to_string()}),
                    Err(trouble) => return Err(trouble.into()),
                };
                let status = job["status"].as_str().unwrap_or_default();
                let why = match status {
                    "succeeded" => self.result(&mut client, &name, &id).await?,
                    "dead" | "cancelled" | "expired" | "gone" => {
                        let last = job["attempts"].as_array().and_then(|a| a.last()?["error"]["message"].as_str());
                        Some(last.or(job["reason"].as_str()).unwrap_or_default().to_owned())
                    }
                    _ => {
                        left.push_back((name, id));
                        continue;
                    }
                };
                moved = true;
                self.print(&name, &id, status, tally, progress)?;
                progress.count(why.is_none());
                if let Some(why) = why {
                    tally.failed += 1;
                    progress.clear();
                    say!("{}: {status}: {}", printable(&name), printable(&why));
                }
            }
            progress.tick();
            round = if moved { ROUND_MIN } else { (round * 2).min(ROUND_MAX) };
            if !moved {
                tokio::time::sleep(round).await;
            }
        }
        Ok(())
    }

    /// Writes the result. If there is none to be had any more, says why.
    pub(super) async fn result(&self, client: &mut Client, name: &str, id: &str) -> Result<Option<String>, Failed> {
        let Some(dir) = &self.results else { return Ok(None) };
        let call = Call::get(format!("/v1/jobs/{}/result", query::encode(id)));
        let answer = match client.insist(&call, Some(self.retry_for), &mut |_| {}).await {
            Ok(answer) => answer,
            Err(Trouble::Refused(refused)) => return Ok(Some(format!("its result is not to be had: {refused}"))),
            Err(trouble) => return Err(trouble.into()),
        };
        let path = dir.join(format!("{}.out", file_name(Path::new(name))));
        // Renamed into place: whoever sees the file sees all of it.
        let part = dir.join(format!(".{}.part", file_name(Path::new(name))));
        let written = std::fs::write(&part, &answer.body).and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|e| Failed::Because(format!("{}: {e}", path.display())))?;
        Ok(None)
    }
}

pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
