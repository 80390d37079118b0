//! Counts what is tried, for [`crate::tables`]: which state each request meets, and what each fault strikes.

use std::sync::Arc;

use leasehold_core::job::record::{Class, Owner};
use leasehold_core::request::{SlotId, Start, Submit};
use leasehold_core::store::{Answer, Clock, Txn};
use leasehold_core::{JobId, Request, StoreOp, Token};

use crate::calls::CallId;
use crate::setup::Regime;
use crate::tables::{Blow, GroupInput, JobInput, QueueInput, SlotInput, Wish, deed};
use crate::world::{Event, World};

/// As many transactions as a fail-over can forget.
const NEWEST: usize = 64;

impl World {
    /// A call has reached its replica.
    pub fn meets(&mut self, call: CallId, clock: Clock) {
        let Some(call) = self.ledger.get(call) else { return };
        let request = call.request.clone();
        match &*request {
            Request::Batch(items) => items.iter().for_each(|item| self.meet(item, clock)),
            one => self.meet(one, clock),
        }
    }

    fn meet(&mut self, request: &Request, clock: Clock) {
        match request {
            Request::Submit(submit) => {
                self.meet_queue(&submit.tenant, &submit.queue, QueueInput::Submit);
                self.meet_key(submit, clock);
                self.count_wishes(submit);
            }
            Request::CreateGroup(asked) => self.meet_key(&asked.common, clock),
            Request::Get { job, .. } => self.meet_job(*job, JobInput::Get, clock),
            Request::Payload { job, .. } => self.meet_job(*job, JobInput::Payload, clock),
            Request::Result { job, .. } => self.meet_job(*job, JobInput::Result, clock),
            Request::Why { job, .. } => self.meet_job(*job, JobInput::Why, clock),
            Request::Cancel { job, .. } => self.meet_job(*job, JobInput::Cancel, clock),
            Request::Retry { job, .. } => self.meet_job(*job, JobInput::Retry, clock),
            Request::Delete { job, .. } => self.meet_job(*job, JobInput::Delete, clock),
            Request::Heartbeat(beat) => {
                self.meet_held(beat.held.job, beat.held.token, JobInput::Heartbeat, JobInput::OldHeartbeat, clock);
            }
            Request::Complete(asked) => {
                self.meet_held(asked.held.job, asked.held.token, JobInput::Complete, JobInput::OldComplete, clock);
            }
            Request::Fail(asked) => {
                self.meet_held(asked.held.job, asked.held.token, JobInput::Fail, JobInput::OldFail, clock);
            }
            Request::Release(held) => {
                self.meet_held(held.job, held.token, JobInput::Release, JobInput::OldRelease, clock);
            }
            Request::GiveBack(asked) => self.meet_job(asked.job, JobInput::GiveBack, clock),
            Request::Claim(asked) => {
                for queue in &asked.queues {
                    self.meet_queue(&asked.tenant, queue, QueueInput::Claim);
                }
            }
            Request::Pause { tenant, queue, .. } => self.meet_queue(tenant, queue, QueueInput::Pause),
            Request::Resume { tenant, queue } => self.meet_queue(tenant, queue, QueueInput::Resume),
            Request::SetQueue { tenant, queue, .. } => self.meet_queue(tenant, queue, QueueInput::Set),
            Request::Purge { tenant, queue, .. } => self.meet_queue(tenant, queue, QueueInput::Purge),
            Request::Queue { tenant, queue } => self.meet_queue(tenant, queue, QueueInput::Queue),
            Request::ExtendGroup { group, .. } => self.meet_group(*group, GroupInput::Extend, clock),
            Request::SealGroup { group, .. } => self.meet_group(*group, GroupInput::Seal, clock),
            Request::CancelGroup { group, .. } => self.meet_group(*group, GroupInput::Cancel, clock),
            Request::Group { group, .. } => self.meet_group(*group, GroupInput::Group, clock),
            Request::Children { group, .. } => self.meet_group(*group, GroupInput::Children, clock),
            Request::Acquire(asked) => {
                let slot = SlotId { slot: asked.slot.clone().unwrap_or_default(), nonce: None };
                self.meet_slot(&asked.tenant, &asked.pool, &slot, SlotInput::Acquire, SlotInput::Acquire, clock);
            }
            Request::RefreshSlot { tenant, pool, slot } => {
                self.meet_slot(tenant, pool, slot, SlotInput::Refresh, SlotInput::OldRefresh, clock);
            }
            Request::ReleaseSlot { tenant, pool, slot } => {
                self.meet_slot(tenant, pool, slot, SlotInput::Release, SlotInput::OldRelease, clock);
            }
            _ => {}
        }
    }

    fn meet_job(&mut self, job: JobId, input: JobInput, clock: Clock) {
        let state = self.oracle.job_state(job, clock);
        self.oracle.tried.jobs.count(state, input);
        let child = match input {
            JobInput::Get => GroupInput::ChildGet,
            JobInput::Why => GroupInput::ChildWhy,
            JobInput::Cancel => GroupInput::ChildCancel,
            JobInput::Retry => GroupInput::ChildRetry,
            JobInput::Delete => GroupInput::ChildDelete,
            _ => return,
        };
        if let Some((group, _)) = job.child_of() {
            self.meet_group(group, child, clock);
        }
    }

    fn meet_held(&mut self, job: JobId, token: Option<Token>, present: JobInput, old: JobInput, clock: Clock) {
        let input = if self.oracle.is_present(job, token) { present } else { old };
        self.meet_job(job, input, clock);
    }

    fn meet_key(&mut self, submit: &Submit, clock: Clock) {
        let bound = submit.key.as_ref().and_then(|key| self.oracle.bound_to(&submit.tenant, key, clock));
        match bound {
            Some(Owner::Job(job)) => self.meet_job(job, JobInput::Submit, clock),
            Some(Owner::Group(group)) => self.meet_group(group, GroupInput::Create, clock),
            None => {}
        }
    }

    fn count_wishes(&mut self, s: &Submit) {
        use Wish as W;
        let setup = &self.setup;
        let one = |is: bool, then: Wish, or: Wish| if is { then } else { or };
        let wishes = [
            one(s.start == Start::Now, W::StartNow, W::StartLater),
            one(s.key.is_none(), W::NoKey, W::Key),
            match s.class {
                Class::Interactive => W::Interactive,
                Class::System => W::System,
                Class::Batch => W::Batch,
            },
            match s.max_attempts {
                None => W::AnyAttempts,
                Some(1) => W::OneAttempt,
                Some(_) => W::MoreAttempts,
            },
            one(s.max_deliveries.is_none(), W::AnyDeliveries, W::FewDeliveries),
            one(s.max_age_ms.is_none(), W::AnyAge, W::MaxAge),
            one(s.lease_ms.is_none(), W::AnyLease, W::OwnLease),
            one(s.run_timeout_ms.is_none(), W::AnyRun, W::RunTimeout),
            one(s.progress_timeout_ms.is_none(), W::AnyProgress, W::ProgressTimeout),
            one(s.queue_ttl_ms.is_none(), W::NoDeadline, W::QueueDeadline),
            match s.retention_ms {
                None => W::AnyRetention,
                Some(0) => W::NoRetention,
                Some(_) => W::Retention,
            },
            one(s.key_ttl_ms.is_none(), W::AnyKeyTtl, W::KeyTtl),
            one(s.on_prem, W::OnPrem, W::AnyWhere),
            one(s.cost == 1, W::Cheap, W::Dear),
            one(setup.replicas == 1, W::OneReplica, W::Replicas),
            match setup.regime {
                Regime::Durable => W::Durable,
                Regime::LoseLastCommits => W::Forgets,
                Regime::EvictKeys => W::Evicts,
            },
            one(setup.config.routing.routes.is_empty(), W::Workers, W::Routed),
            one(setup.config.mailbox < 100, W::Tiny, W::Roomy),
            one(setup.config.commit_txns == 1, W::Single, W::Batches),
        ];
        for (n, one) in wishes.iter().enumerate() {
            for other in &wishes[n + 1..] {
                self.oracle.tried.wishes.count(*one, *other);
            }
        }
    }

    fn meet_group(&mut self, group: leasehold_core::ids::GroupId, input: GroupInput, clock: Clock) {
        let state = self.oracle.group_state(group, clock);
        self.oracle.tried.groups.count(state, input);
    }

    fn meet_slot(&mut self, tenant: &str, pool: &str, slot: &SlotId, present: SlotInput, old: SlotInput, clock: Clock) {
        let (state, other) = self.oracle.slot_state(tenant, pool, slot, clock);
        self.oracle.tried.slots.count(state, if other { old } else { present });
    }

    fn meet_queue(&mut self, tenant: &str, queue: &str, input: QueueInput) {
        let state = self.oracle.queue_state(tenant, queue);
        self.oracle.tried.queues.count(state, input);
    }

    // --- faults -------------------------------------------------------------------------------

    /// A fault strikes what goes between a replica and the store.
    pub fn blow(&mut self, blow: Blow, op: &StoreOp, applied: bool) {
        let StoreOp::Commit(commit) = op else { return };
        commit.txns.iter().for_each(|txn| self.blow_txn(blow, txn, applied));
    }

    pub fn blow_txn(&mut self, blow: Blow, txn: &Txn, applied: bool) {
        let tried = &mut self.oracle.tried;
        let table = if applied { &mut tried.struck_after } else { &mut tried.struck_before };
        table.count(deed(txn), blow);
    }

    /// A transaction was put to the store, and a fail-over may forget it.
    pub fn may_be_forgotten(&mut self, txn: &Txn, answer: &Answer) {
        if self.setup.regime == Regime::LoseLastCommits {
            let applied = matches!(answer, Answer::Applied { .. });
            self.links.newest.push_back(applied.then(|| deed(txn)));
            if self.links.newest.len() > NEWEST {
                self.links.newest.pop_front();
            }
        }
    }

    /// So many of the newest were forgotten.
    pub fn forgotten(&mut self, lost: usize) {
        for _ in 0..lost {
            if let Some(deed) = self.links.newest.pop_back().flatten() {
                self.oracle.tried.struck_after.count(deed, Blow::Forgotten);
            }
        }
    }

    /// A fault strikes a replica, or with none the store, and so all that is under way there.
    pub fn blow_all(&mut self, blow: Blow, replica: Option<usize>) {
        let hit = |of: u8, epoch: u32| {
            self.hosts[usize::from(of)].epoch == epoch && replica.is_none_or(|r| r == usize::from(of))
        };
        let under_way: Vec<(Arc<StoreOp>, bool)> = self
            .pending()
            .into_iter()
            .filter_map(|(_, event)| match event {
                Event::AtStore { replica, epoch, op, again: false, .. } if hit(*replica, *epoch) => {
                    Some((op.clone(), false))
                }
                Event::FromStore { replica, epoch, op, .. } if hit(*replica, *epoch) => Some((op.clone(), true)),
                _ => None,
            })
            .collect();
        under_way.iter().for_each(|(op, applied)| self.blow(blow, op, *applied));
    }
}
