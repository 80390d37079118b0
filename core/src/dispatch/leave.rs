//! What was held for a job that was cancelled comes back when its call is over.

use alloc::vec;
use alloc::vec::Vec;

use crate::failure::Failure;
use crate::job::check;
use crate::job::lease::Granted;
use crate::job::moves;
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied};
use crate::request::{GiveBack, Response};
use crate::store::{Answer, Clock, Read, Record, Snapshot, keys};

/// Takes out what is held for a lease that does not stand any more.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Leave(GiveBack);

impl Leave {
    pub fn new(asked: GiveBack) -> Result<Leave, Failure> {
        check::name("upstream", &asked.placed.upstream)?;
        check::within("cost", Some(asked.placed.cost.into()), 1, limits::COST_MAX.into())?;
        if let Some(pool) = &asked.placed.pool {
            check::name("pool", pool)?;
        }
        Ok(Leave(asked))
    }
}

impl Operation for Leave {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        Next::Read(Read { records: vec![keys::lease(self.0.job)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        let GiveBack { job, token, class, placed } = &self.0;
        let lease = snapshot.records.first().unwrap_or(&Record::Absent);
        // Of its nonce, which the units carry: after a fail-over a late copy may have granted it once more, at another time.
        if Granted::read(lease).is_some_and(|granted| granted.version == token.nonce) {
            return Next::fail(check::invalid("token", "the job is leased under it: end the attempt instead".into()));
        }
        // The units carry the nonce of their lease: nothing of a later one is touched.
        let writes = moves::give_back(*job, *class, Some(placed), token.nonce);
        if writes.is_empty() {
            return Next::ok(Response::GivenBack);
        }
        // After a fail-over it may stand again.
        let guards = vec![moves::as_read(keys::lease(*job), lease)];
        Next::Commit(Plan::new(vec![Draft::new(guards, writes)]))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        // The lease has changed meanwhile, or the store's clock may have stepped past the commit's time.
        if applied(&answers) { Next::ok(Response::GivenBack) } else { self.start(cx) }
    }
}
