//! A group from its creation to its end, by workers that take what is released.

use std::cell::Cell;
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::{Bench, Measure, between, completions, count, leases};
use crate::cli::Failed;
use crate::cli::client::unique;

/// Children in one page.
const PAGE: usize = 1_000;
/// Children released at a time.
pub const PARALLEL: usize = 64;

/// What one group took.
pub struct Grouped {
    pub created: Duration,
    pub ran: Duration,
    /// Its calls are the completions.
    pub measure: Measure,
}

impl Bench {
    /// Creates a group of so many children and runs it to its end.
    pub(super) async fn group(&self, children: usize) -> Result<Grouped, Failed> {
        let queue = format!("bench-{}", unique());
        let mut connection = self.open().await?;
        let begun = Instant::now();
        let create = format!("{{\"queue\":\"{queue}\",\"sealed\":false,\"children\":[],\"max_parallel\":{PARALLEL}}}");
        let request = connection.request("/v1/groups", &create);
        let status = connection.call(&request).await?;
        let answer = String::from_utf8_lossy(connection.body()).into_owned();
        let Some((id, _)) = between(&answer, "\"id\":\"").filter(|_| status == 201) else {
            return Err(Failed::Because(format!("the group was not created: {status} {answer}")));
        };
        let child = format!("{{\"payload\":\"{}\"}}", "x".repeat(self.payload.saturating_sub(2)));
        for from in (0..children).step_by(PAGE) {
            let page = vec![child.as_str(); PAGE.min(children - from)].join(",");
            let body = format!("{{\"from\":{from},\"children\":[{page}]}}");
            let request = connection.request(&format!("/v1/groups/{id}/children"), &body);
            while connection.call(&request).await? != 200 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        let request = connection.request(&format!("/v1/groups/{id}/seal"), "");
        connection.call(&request).await?;
        let created = begun.elapsed();
        let begun = Instant::now();
        let measure = Rc::new(RefCell::new(Measure::default()));
        let left = Rc::new(Cell::new(children));
        // When the last child was completed; other workers still wait for more then.
        let ran = Rc::new(Cell::new(None));
        let mut tasks = Vec::new();
        for n in 0..usize::from(self.batchers) {
            let mut connection = self.open().await?;
            let (measure, left, ran) = (measure.clone(), left.clone(), ran.clone());
            let max = PARALLEL.div_ceil(usize::from(self.batchers));
            let claim = format!("{{\"worker\":\"bench-{n}\",\"queues\":[\"{queue}\"],\"max\":{max},\"wait_ms\":500}}");
            tasks.push(tokio::task::spawn_local(async move {
                let claim = connection.request("/v1/claims", &claim);
                while left.get() > 0 {
                    if connection.call(&claim).await? != 200 {
                        measure.borrow_mut().errors += 1;
                        continue;
                    }
                    let leases = leases(connection.body());
                    if leases.is_empty() {
                        continue;
                    }
                    let request = connection.request("/v1/completions", &completions(&leases));
                    let sent = Instant::now();
                    let status = connection.call(&request).await?;
                    let mut m = measure.borrow_mut();
                    m.calls.push(sent.elapsed());
                    let done = count(connection.body(), b"{\"status\":200}");
                    left.set(left.get().saturating_sub(done));
                    if left.get() == 0 {
                        ran.set(Some(begun.elapsed()));
                    }
                    m.jobs += done as u64;
                    m.errors += u64::from(status != 200 || done != leases.len());
                }
                Ok::<_, io::Error>(())
            }));
        }
        for task in tasks {
            task.await.map_err(|e| Failed::Because(e.to_string()))??;
        }
        let request = connection.get(&format!("/v1/groups/{id}?wait_ms=10000"));
        connection.call(&request).await?;
        let ran = ran.get().unwrap_or_else(|| begun.elapsed());
        let answer = String::from_utf8_lossy(connection.body()).into_owned();
        if !answer.contains("\"status\":\"succeeded\"") {
            return Err(Failed::Because(format!("the group did not succeed: {answer}")));
        }
        Ok(Grouped { created, ran, measure: measure.take() })
    }
}
