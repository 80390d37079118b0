//! Renewing a lease for as long as its job is worked on.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::json;
use tokio::sync::watch;

use crate::cli::client::{Call, Client, Refused, Server, Trouble};

/// Longest pause before a heartbeat that was not answered is sent again.
const AGAIN: Duration = Duration::from_secs(1);

/// What a heartbeat brought.
pub enum Beat {
    Renewed,
    /// The job is not ours: why.
    Taken(String),
    Unanswered(Trouble),
}

/// The job is not ours any more, or not at all.
pub fn is_gone(refused: &Refused) -> bool {
    refused.status == StatusCode::NOT_FOUND || refused.status == StatusCode::CONFLICT
}

/// One lease.
#[derive(Clone, Debug)]
pub struct Lease {
    pub server: Server,
    pub id: String,
    pub token: String,
    pub length: Duration,
}

impl Lease {
    pub async fn renew(&self, client: &mut Client) -> Beat {
        let call = Call::post(format!("/v1/jobs/{}/heartbeat", self.id), json!({"token": self.token}).to_string());
        match client.call(&call).await {
            Ok(answer) => match answer.json() {
                Ok(beat) if beat["cancel_requested"] == true => Beat::Taken("the job was cancelled".into()),
                _ => Beat::Renewed,
            },
            Err(Trouble::Refused(refused)) if is_gone(&refused) => Beat::Taken(refused.to_string()),
            Err(trouble) => Beat::Unanswered(trouble),
        }
    }

    /// Renews at a third of the length until the server says that there is no lease, which `taken` is
    /// told. While a renewal is not answered, one more is `failing`.
    pub async fn keep(self, failing: Arc<watch::Sender<usize>>, taken: watch::Sender<Option<String>>) {
        let mut client = Client::new(self.server.clone());
        let every = self.length / 3;
        loop {
            tokio::time::sleep(every).await;
            let mut trouble: Option<Failing> = None;
            // A server that does not answer is asked again soon, well within the lease.
            loop {
                match tokio::time::timeout(every, self.renew(&mut client)).await {
                    Ok(Beat::Renewed) => break,
                    Ok(Beat::Taken(why)) => {
                        taken.send_replace(Some(why));
                        return;
                    }
                    Ok(Beat::Unanswered(_)) => {
                        trouble.get_or_insert_with(|| Failing::new(&failing));
                        tokio::time::sleep((every / 8).min(AGAIN)).await;
                    }
                    Err(_) => {
                        trouble.get_or_insert_with(|| Failing::new(&failing));
                    }
                }
            }
        }
    }
}

/// One lease whose renewal is not answered; until dropped.
struct Failing(Arc<watch::Sender<usize>>);

impl Failing {
    fn new(failing: &Arc<watch::Sender<usize>>) -> Failing {
        failing.send_modify(|n| *n += 1);
        Failing(failing.clone())
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}
