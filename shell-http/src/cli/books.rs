//! A store to look into: a server's, or a stopped one's on disk. Both are asked the same and answer
//! the same JSON.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use leasehold_core::store::{Store as _, StoreError};
use leasehold_core::{Config, Request, Response, StoreId, StoreOp};
use leasehold_disk::{DiskStore, Event, Options};
use serde_json::Value;

use super::client::{Call, Client, Refused};
use super::{Failed, Outage, To};
use crate::driver::{self, Deliver, Running};
use crate::problem::{Row, of_failure};
use crate::store::{Address, StoreHandle};
use crate::wire::{store, view};

/// How long a server that has answered before is asked again, as over a restart.
const PATIENCE: Duration = Duration::from_secs(30);
/// And one that never has: perhaps there is none.
const FIRST: Duration = Duration::from_millis(1_500);
/// A stopped store is looked at, not run: its deadlines are not watched.
const NEVER_MS: u64 = 24 * 3_600_000;

/// Which store.
#[derive(Args, Clone, Debug)]
pub struct Where {
    #[command(flatten)]
    to: To,
    /// A stopped store, as disk:FOLDER, instead of a server's
    // Read later: a complaint of the command line's quotes what was given, and that may hold a password.
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
}

pub enum Books {
    Live { client: Client, outage: Outage, patience: Duration },
    Stopped(Running),
}

impl Where {
    /// With `may_change` false, nothing of a stopped store is changed.
    pub async fn open(&self, may_change: bool) -> Result<Books, Failed> {
        let store = self.store.as_deref().map(str::parse).transpose();
        match &store.map_err(|why| Failed::Usage(format!("--store: {why}")))? {
            None => Ok(Books::Live {
                client: Client::new(self.to.server.clone()),
                outage: Outage::default(),
                patience: FIRST,
            }),
            Some(Address::Memory) => Err(Failed::Usage("a store in memory is gone when its server has stopped".into())),
            Some(Address::Redis(_)) => Err(Failed::Usage("ask any server of a shared store: --server URL".into())),
            Some(Address::Disk(path)) => stopped(Path::new(path), may_change).map(Books::Stopped),
        }
    }
}

fn stopped(path: &Path, may_change: bool) -> Result<Running, Failed> {
    // Opening would make a store of an empty folder.
    if !path.join("FORMAT").is_file() {
        return Err(Failed::Because(format!("there is no store in {}", path.display())));
    }
    let config = Config { sweep_ms: NEVER_MS, scrub_ms: 0, ..Config::default() };
    driver::start(config, driver::seed()?, None, |deliver| {
        let options = Options { read_only: !may_change, ..Options::default() };
        let store = DiskStore::open(path, options).map_err(|e| {
            Failed::Because(format!(
                "the store in {} cannot be opened: {e}. Of a server that runs, ask the server: --server URL",
                path.display()
            ))
        })?;
        Ok(Still { store: Mutex::new(store), deliver, folder: path.to_owned(), may_change })
    })
}

impl Books {
    /// Asks a server for the path, or the store itself for the same.
    pub async fn ask(&mut self, call: &Call, request: Request) -> Result<Value, Failed> {
        match self {
            Books::Live { client, outage, patience } => {
                let answer = client.insist(call, Some(*patience), &mut |t| outage.trouble(t)).await?;
                outage.over();
                *patience = PATIENCE;
                Ok(answer.json()?)
            }
            Books::Stopped(running) => {
                let mut out = Vec::new();
                match running.driver().ask(request).await {
                    Ok(Response::Audited(page)) => store::audited(&mut out, &page),
                    Ok(Response::Inspected(seen)) => store::inspected(&mut out, &seen),
                    Ok(Response::Queues(queues)) => {
                        let mut object = crate::wire::json::Object::new(&mut out);
                        crate::wire::json::array(object.key("queues"), &queues, |out, q| view::queue(out, q, |_| {}));
                        object.end();
                    }
                    // Nothing else is asked.
                    Ok(_) => {}
                    Err(failure) => {
                        let Row { status, detail, .. } = of_failure(&failure);
                        let refused = Refused { status, code: failure.code().into(), detail: detail.into() };
                        return Err(refused.into());
                    }
                }
                serde_json::from_slice(&out).map_err(|e| Failed::Because(e.to_string()))
            }
        }
    }

    pub fn close(self) {
        if let Books::Stopped(running) = self {
            running.stop();
        }
    }
}

/// A store on disk without housekeeping, and unless it may, without commits: a replica on it cannot
/// change anything, whatever it finds overdue.
struct Still {
    store: Mutex<DiskStore>,
    deliver: Deliver,
    folder: PathBuf,
    may_change: bool,
}

impl StoreHandle for Still {
    fn send(&self, id: StoreId, op: StoreOp) -> bool {
        if matches!(op, StoreOp::Commit(_)) && !self.may_change {
            // A store that says so works, and the replica does without.
            self.deliver.deliver(vec![Event::Reply { id, reply: Err(StoreError::Full) }]);
            return true;
        }
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events = Vec::new();
        store.process(vec![(id, op)], |id, reply| events.push(Event::Reply { id, reply }));
        events.extend(store.notified().into_iter().map(Event::Notified));
        events.extend(store.damaged().into_iter().map(Event::Damaged));
        events.extend(store.faults().into_iter().map(Event::Fault));
        drop(store);
        self.deliver.deliver(events);
        true
    }

    fn poisoned(&self) -> Option<String> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        store.poisoned().map(str::to_owned)
    }

    fn folder(&self) -> Option<PathBuf> {
        Some(self.folder.clone())
    }

    fn close(self) {
        // What may not change is not even closed in order: that would write its clock.
        if self.may_change {
            self.store.into_inner().unwrap_or_else(PoisonError::into_inner).close();
        }
    }
}
