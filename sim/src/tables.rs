//! What was tried: tables of state × input and of fault × operation, counted while seeds run.
//!
//! A run proves nothing about what it did not do. Each cell counts how often an input met a state, or a fault
//! an operation. A cell that cannot be reached is declared so, with the reason; any other that is empty after
//! enough seeds is a hole in the simulator, and `sim --tables` lists it.

use std::fmt::Write as _;

use leasehold_core::event::{Kind, kind_of};
use leasehold_core::store::{Txn, Write, keys};

/// A small set of words that name the rows or the columns of a table.
pub trait Word: Copy + Eq + 'static {
    const ALL: &'static [Self];

    fn text(self) -> &'static str;
    fn index(self) -> usize;
}

macro_rules! words {
    ($($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $word:ident $text:literal),* $(,)? })*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $word),* }

        impl Word for $name {
            const ALL: &'static [$name] = &[$($name::$word),*];

            fn text(self) -> &'static str {
                match self { $($name::$word => $text),* }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    )* };
}

words! {
    /// How a job stood when something met it.
    JobState {
        /// There never was such a job, or nothing is left of it.
        Unknown "unknown",
        Scheduled "scheduled",
        /// A child that its group holds back.
        Held "held",
        Queued "queued",
        Running "running",
        /// Its lease is over and nobody has noticed.
        Overdue "overdue",
        Retrying "retrying",
        Succeeded "succeeded",
        Dead "dead",
        Cancelled "cancelled",
        Expired "expired",
        /// Deleted or lost; only a stub is left.
        Deleted "deleted",
        /// A fault took something of it, and it has not been mended.
        Damaged "damaged",
    }

    /// What is asked about a job. *old*: with a token that is not that of its present lease.
    JobInput {
        /// Submitted again under its key.
        Submit "submit",
        Get "get",
        Payload "payload",
        Result "result",
        Why "why",
        Cancel "cancel",
        Retry "retry",
        Delete "delete",
        Heartbeat "heartbeat",
        Complete "complete",
        Fail "fail",
        Release "release",
        OldHeartbeat "old heartbeat",
        OldComplete "old complete",
        OldFail "old fail",
        OldRelease "old release",
        GiveBack "give back",
    }

    /// What became of a job by a commit.
    JobTurn {
        Submitted "submitted",
        Claimed "claimed",
        Promoted "promoted",
        LetGo "let go",
        Extended "extended",
        Released "released",
        LeaseExpired "lease expired",
        TimedOut "timed out",
        Retrying "retrying",
        Succeeded "succeeded",
        Dead "dead",
        Cancelled "cancelled",
        Expired "expired",
        Lost "lost",
        Retried "retried",
        Deleted "deleted",
        Removed "removed",
        Reindexed "reindexed",
        Quarantined "quarantined",
    }

    GroupState {
        Unknown "unknown",
        Open "open",
        Sealed "sealed",
        /// Cancelled, or a child is dead and it fails fast.
        Stopped "stopped",
        Succeeded "succeeded",
        Partial "partial",
        Failed "failed",
        Cancelled "cancelled",
        Damaged "damaged",
    }

    GroupInput {
        /// Created again under its key.
        Create "create",
        Extend "extend",
        Seal "seal",
        Cancel "cancel",
        Group "group",
        Children "children",
        ChildGet "child get",
        ChildWhy "child why",
        ChildCancel "child cancel",
        ChildRetry "child retry",
        ChildDelete "child delete",
    }

    /// What became of a group, or of one of its children, by a commit.
    GroupTurn {
        Created "created",
        Extended "extended",
        Sealed "sealed",
        Stopped "stopped",
        ChildLetGo "child let go",
        ChildSucceeded "child succeeded",
        ChildDead "child dead",
        ChildCancelled "child cancelled",
        ChildExpired "child expired",
        ChildRetried "child retried",
        Finalized "finalized",
    }

    SlotState {
        NoPool "no pool",
        Absent "absent",
        Waiting "waiting",
        Held "held",
        /// Held past its end, and nobody has noticed.
        Overdue "overdue",
        /// Granted by a replica without the store.
        Declared "declared",
    }

    /// What is asked about a slot. *old*: of another grant.
    SlotInput {
        Acquire "acquire",
        Refresh "refresh",
        Release "release",
        OldRefresh "old refresh",
        OldRelease "old release",
    }

    QueueState {
        /// Nothing was ever in it, and it has no settings.
        Unknown "unknown",
        /// Nothing is ready.
        Idle "idle",
        Ready "ready",
        Paused "paused",
    }

    QueueInput {
        Submit "submit",
        Claim "claim",
        Pause "pause",
        Resume "resume",
        Set "set",
        Purge "purge",
        Queue "queue",
    }

    /// What a submit asks for, and in what kind of world.
    Wish {
        StartNow "starts now",
        StartLater "starts later",
        NoKey "no key",
        Key "key",
        Interactive "interactive",
        System "system",
        Batch "batch",
        AnyAttempts "default attempts",
        OneAttempt "one attempt",
        MoreAttempts "more attempts",
        AnyDeliveries "default deliveries",
        FewDeliveries "max deliveries",
        AnyAge "any age",
        MaxAge "max age",
        AnyLease "default lease",
        OwnLease "own lease",
        AnyRun "no run time-out",
        RunTimeout "run time-out",
        AnyProgress "no progress time-out",
        ProgressTimeout "progress time-out",
        NoDeadline "no queue deadline",
        QueueDeadline "queue deadline",
        AnyRetention "default retention",
        NoRetention "no retention",
        Retention "retention",
        AnyKeyTtl "key as long",
        KeyTtl "key longer",
        AnyWhere "anywhere",
        OnPrem "on the premises",
        Cheap "cost one",
        Dear "cost more",
        OneReplica "one replica",
        Replicas "replicas",
        Durable "durable",
        Forgets "forgets commits",
        Evicts "evicts",
        Routed "servers run it",
        Workers "workers run it",
        Roomy "large mailbox",
        Tiny "tiny mailbox",
        Batches "large commits",
        Single "commits of one",
    }

    /// What a fault did.
    Blow {
        RequestLost "request lost",
        RequestLate "request late",
        Refused "refused",
        Broken "broken",
        StoreDown "store down",
        StoreFull "store full",
        CutOff "cut off",
        Partial "partial",
        Repeated "repeated",
        ReplyLost "reply lost",
        ReplyTwice "reply twice",
        Crash "crash",
        Pause "pause",
        StoreClock "store clock",
        ReplicaClock "replica clock",
        Forgotten "forgotten",
    }

    /// What a transaction does.
    Deed {
        Submit "submit",
        Claim "claim",
        /// By its name, for a server that runs it.
        Dispatch "dispatch",
        Heartbeat "heartbeat",
        Succeed "succeed",
        FailRetry "fail, to be retried",
        Bury "fail for good",
        Release "release",
        Lapse "lapse",
        TimeOut "time out",
        Cancel "cancel",
        Expire "expire",
        Lose "lose",
        Retry "retry",
        Delete "delete",
        Remove "remove",
        Promote "promote",
        LetGo "let go",
        Mend "mend",
        GroupCreate "create group",
        GroupExtend "extend group",
        GroupSeal "seal group",
        GroupStop "stop group",
        GroupFinal "finalize group",
        GroupRemove "remove group",
        PoolSet "set pool",
        SlotGrant "grant slot",
        SlotWait "wait for slot",
        SlotRefresh "refresh slot",
        SlotRelease "release slot",
        GiveBack "give back",
        QueueSet "set queue",
        Hold "hold upstream",
        Names "names",
        Ready "ready",
        Other "other",
    }
}

impl JobTurn {
    pub fn of(kind: Kind) -> JobTurn {
        match kind {
            Kind::Submitted => JobTurn::Submitted,
            Kind::Claimed => JobTurn::Claimed,
            Kind::Released => JobTurn::Released,
            Kind::LeaseExpired => JobTurn::LeaseExpired,
            Kind::TimedOut => JobTurn::TimedOut,
            Kind::Retrying => JobTurn::Retrying,
            Kind::Succeeded => JobTurn::Succeeded,
            Kind::Dead => JobTurn::Dead,
            Kind::Cancelled => JobTurn::Cancelled,
            Kind::Expired => JobTurn::Expired,
            Kind::Lost => JobTurn::Lost,
            Kind::Retried => JobTurn::Retried,
            Kind::Reindexed => JobTurn::Reindexed,
            Kind::Quarantined => JobTurn::Quarantined,
            Kind::Deleted | Kind::GroupCreated | Kind::GroupExtended | Kind::GroupSealed | Kind::GroupFinalized => {
                JobTurn::Deleted
            }
        }
    }
}

/// How often each column was met in each row.
#[derive(Clone, Debug)]
pub struct Table<R, C> {
    name: &'static str,
    cells: Vec<u64>,
    /// Why a cell cannot be reached.
    never: fn(R, C) -> Option<&'static str>,
}

impl<R: Word, C: Word> Table<R, C> {
    fn new(name: &'static str, never: fn(R, C) -> Option<&'static str>) -> Table<R, C> {
        Table { name, cells: vec![0; R::ALL.len() * C::ALL.len()], never }
    }

    pub fn count(&mut self, row: R, column: C) {
        self.cells[row.index() * C::ALL.len() + column.index()] += 1;
    }

    pub fn get(&self, row: R, column: C) -> u64 {
        self.cells[row.index() * C::ALL.len() + column.index()]
    }
}

/// A table whatever its words are.
trait Any {
    fn name(&self) -> &'static str;
    fn cells(&self) -> &[u64];
    fn cells_mut(&mut self) -> &mut Vec<u64>;
    /// Rows of texts, the first with the names of the columns.
    fn texts(&self) -> Vec<Vec<String>>;
    /// Cells that are empty without a reason, and those that are not although there is one.
    fn odd(&self) -> (Vec<String>, Vec<String>);
}

impl<R: Word, C: Word> Any for Table<R, C> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cells(&self) -> &[u64] {
        &self.cells
    }

    fn cells_mut(&mut self) -> &mut Vec<u64> {
        &mut self.cells
    }

    fn texts(&self) -> Vec<Vec<String>> {
        let head = std::iter::once(self.name.to_owned()).chain(C::ALL.iter().map(|c| c.text().to_owned()));
        let row = |r: &R| {
            let cell = |c: &C| match (self.get(*r, *c), (self.never)(*r, *c)) {
                (0, Some(_)) => "-".to_owned(),
                (0, None) => "NEVER".to_owned(),
                (n, _) => n.to_string(),
            };
            std::iter::once(r.text().to_owned()).chain(C::ALL.iter().map(cell)).collect()
        };
        std::iter::once(head.collect()).chain(R::ALL.iter().map(row)).collect()
    }

    fn odd(&self) -> (Vec<String>, Vec<String>) {
        let (mut empty, mut wrong) = (Vec::new(), Vec::new());
        for r in R::ALL {
            for c in C::ALL {
                let text = || format!("{}: {} × {}", self.name, r.text(), c.text());
                match (self.get(*r, *c), (self.never)(*r, *c)) {
                    (0, None) => empty.push(text()),
                    (n, Some(why)) if n > 0 => wrong.push(format!("{}, {n} times, though {why}", text())),
                    _ => {}
                }
            }
        }
        (empty, wrong)
    }
}

macro_rules! tables {
    ($($field:ident: $row:ident, $column:ident, $name:literal, $never:ident;)*) => {
        /// All tables.
        #[derive(Clone, Debug)]
        pub struct Tables { $(pub $field: Table<$row, $column>),* }

        impl Default for Tables {
            fn default() -> Tables {
                Tables { $($field: Table::new($name, $never)),* }
            }
        }

        impl Tables {
            fn all(&self) -> Vec<&dyn Any> {
                vec![$(&self.$field),*]
            }

            fn all_mut(&mut self) -> Vec<&mut dyn Any> {
                vec![$(&mut self.$field),*]
            }
        }
    };
}

tables! {
    jobs: JobState, JobInput, "job met by", never_asked;
    turns: JobState, JobTurn, "job was", never_turns;
    groups: GroupState, GroupInput, "group met by", never_group_asked;
    group_turns: GroupState, GroupTurn, "group was", never_group_turns;
    slots: SlotState, SlotInput, "slot met by", never_slot_asked;
    queues: QueueState, QueueInput, "queue met by", never_queue_asked;
    wishes: Wish, Wish, "submitted with", never_wished;
    struck_before: Deed, Blow, "struck before its commit", never_before;
    struck_after: Deed, Blow, "struck after its commit", never_after;
}

impl Tables {
    pub fn add(&mut self, other: &Tables) {
        for (mine, theirs) in self.all_mut().into_iter().zip(other.all()) {
            for (mine, theirs) in mine.cells_mut().iter_mut().zip(theirs.cells()) {
                *mine += theirs;
            }
        }
    }

    /// Cells that are empty without a reason.
    pub fn empty(&self) -> Vec<String> {
        self.all().iter().flat_map(|table| table.odd().0).collect()
    }

    /// Cells that were reached though a reason is given why they cannot be.
    pub fn wrong(&self) -> Vec<String> {
        self.all().iter().flat_map(|table| table.odd().1).collect()
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        for table in self.all() {
            if table.name() == self.wishes.name {
                // Too wide to be read: what is missing is told.
                let _ = writeln!(out, "{}: {}\n", table.name(), self.wished());
                continue;
            }
            let texts = table.texts();
            for (n, row) in texts.iter().enumerate() {
                let _ = writeln!(out, "| {} |", row.join(" | "));
                if n == 0 {
                    let _ = writeln!(out, "| --- |{}", " ---: |".repeat(row.len() - 1));
                }
            }
            out.push('\n');
        }
        out
    }

    fn wished(&self) -> String {
        let pairs = || Wish::ALL.iter().flat_map(|a| Wish::ALL.iter().map(|b| (*a, *b)));
        let possible = pairs().filter(|(a, b)| never_wished(*a, *b).is_none());
        let (met, all) =
            possible.fold((0, 0), |(met, all), (a, b)| (met + u32::from(self.wishes.get(a, b) > 0), all + 1));
        format!("{met} of {all} pairs of options")
    }

    /// A line for each table, which [`Tables::take`] reads.
    pub fn lines(&self) -> Vec<String> {
        let line = |table: &&dyn Any| {
            let cells: Vec<String> = table.cells().iter().map(u64::to_string).collect();
            format!("{} {}", table.name().replace(' ', "-"), cells.join(","))
        };
        self.all().iter().map(line).collect()
    }

    /// Takes over one of those lines.
    pub fn take(&mut self, name: &str, cells: &str) -> Option<()> {
        let read: Vec<u64> = cells.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
        let mut all = self.all_mut();
        let table = all.iter_mut().find(|table| table.name().replace(' ', "-") == name)?;
        (read.len() == table.cells().len()).then(|| *table.cells_mut() = read)
    }
}

/// What a transaction does, by its audit event, or by what it writes.
pub fn deed(txn: &Txn) -> Deed {
    for write in &txn.writes {
        let Write::Append { bytes, .. } = write else { continue };
        let Some(kind) = kind_of(bytes) else { continue };
        return match kind {
            Kind::Submitted => Deed::Submit,
            Kind::Claimed if txn.take.is_none() => Deed::Dispatch,
            Kind::Claimed => Deed::Claim,
            Kind::Released => Deed::Release,
            Kind::LeaseExpired => Deed::Lapse,
            Kind::TimedOut => Deed::TimeOut,
            Kind::Retrying => Deed::FailRetry,
            Kind::Succeeded => Deed::Succeed,
            Kind::Dead => Deed::Bury,
            Kind::Cancelled => Deed::Cancel,
            Kind::Expired => Deed::Expire,
            Kind::Lost => Deed::Lose,
            Kind::Retried => Deed::Retry,
            Kind::Deleted => Deed::Delete,
            Kind::Reindexed | Kind::Quarantined => Deed::Mend,
            Kind::GroupCreated => Deed::GroupCreate,
            Kind::GroupExtended => Deed::GroupExtend,
            Kind::GroupSealed => Deed::GroupSeal,
            Kind::GroupFinalized => Deed::GroupFinal,
        };
    }
    let has = |what: &dyn Fn(&Write) -> bool| txn.writes.iter().any(what);
    let puts = |prefix: &'static [u8]| has(&|w| matches!(w, Write::Put { key, .. } if key.starts_with(prefix)));
    let deletes = |prefix: &'static [u8]| has(&|w| matches!(w, Write::Delete(key) if key.starts_with(prefix)));
    let adds = |prefix: &'static [u8]| has(&|w| matches!(w, Write::Add { index, .. } if index.starts_with(prefix)));
    let removes =
        |prefix: &'static [u8]| has(&|w| matches!(w, Write::Remove { index, .. } if index.starts_with(prefix)));
    let expires = |prefix: &'static [u8]| has(&|w| matches!(w, Write::Expire(key, _) if key.starts_with(prefix)));
    let touches_slot = puts(b"slot/") || deletes(b"slot/") || expires(b"slot/");
    let takes = |prefix: &[u8]| {
        txn.take.as_ref().is_some_and(|take| take.from.iter().any(|source| source.index.starts_with(prefix)))
    };
    let from_end = |w: &Write| {
        matches!(w, Write::Remove { index, .. }
        if keys::status_of(index).is_some_and(|(_, _, _, status)| status.is_terminal()))
    };
    match () {
        () if puts(b"ready/") => Deed::Ready,
        () if puts(b"hold/") || deletes(b"hold/") => Deed::Hold,
        () if puts(b"queue/") || deletes(b"queue/") => Deed::QueueSet,
        () if puts(b"pool/") || deletes(b"pool/") => Deed::PoolSet,
        () if puts(b"slot/") && adds(b"holders/") => Deed::SlotGrant,
        () if puts(b"slot/") && adds(b"waiting/") => Deed::SlotWait,
        () if removes(b"holders/") && !touches_slot => Deed::GiveBack,
        () if deletes(b"slot/") || removes(b"holders/") || puts(b"slot/") => Deed::SlotRelease,
        () if adds(b"holders/") && !adds(b"leases") => Deed::SlotRefresh,
        () if adds(b"alive/") => Deed::SlotWait,
        () if removes(b"groups/ended") || removes(b"held/") => Deed::GroupRemove,
        () if takes(b"held/") => Deed::LetGo,
        () if puts(b"group/") => Deed::GroupStop,
        () if txn.take.is_some() || has(&from_end) => Deed::Remove,
        () if removes(b"due") => Deed::Promote,
        () if adds(b"leases") || puts(b"progress/") => Deed::Heartbeat,
        () if removes(b"names") || adds(b"names") => Deed::Names,
        () => Deed::Other,
    }
}

// --- why a cell cannot be reached ----------------------------------------------------------------

fn never_asked(state: JobState, input: JobInput) -> Option<&'static str> {
    use JobInput::{
        Complete, Fail, GiveBack, Heartbeat, OldComplete, OldFail, OldHeartbeat, OldRelease, Release, Submit,
    };
    use JobState::{Cancelled, Damaged, Dead, Deleted, Expired, Held, Overdue, Running, Unknown};
    match (state, input) {
        (Running | Overdue | Damaged, Heartbeat | Complete | Fail | Release) => None,
        (_, Heartbeat | Complete | Fail | Release) => Some("a token is the present one only while its job runs"),
        (Dead | Cancelled | Expired, Submit) => Some("an end other than success frees the key"),
        (Unknown | Deleted, Submit) => Some("with a job that is gone its key is free"),
        (Held, Submit) => Some("a child has no key of its own"),
        // Only a fail-over brings a job back to where it had not been leased yet.
        (JobState::Scheduled, OldHeartbeat | OldComplete | OldFail | OldRelease | GiveBack) => None,
        _ => None,
    }
}

fn never_turns(state: JobState, turn: JobTurn) -> Option<&'static str> {
    use JobState as S;
    use JobTurn as T;
    let can = match turn {
        T::Submitted => matches!(state, S::Unknown),
        T::Claimed => matches!(state, S::Queued | S::Damaged),
        T::Promoted => matches!(state, S::Scheduled | S::Retrying | S::Damaged),
        T::LetGo => matches!(state, S::Held | S::Damaged),
        T::Extended => matches!(state, S::Running | S::Overdue | S::Damaged),
        T::Released | T::Retrying | T::Succeeded | T::Dead => matches!(state, S::Running | S::Overdue),
        T::LeaseExpired | T::TimedOut => matches!(state, S::Overdue),
        T::Cancelled => {
            matches!(state, S::Scheduled | S::Held | S::Queued | S::Running | S::Overdue | S::Retrying)
        }
        T::Expired => matches!(state, S::Scheduled | S::Held | S::Queued | S::Running | S::Overdue),
        T::Lost | T::Reindexed | T::Quarantined => matches!(state, S::Damaged),
        T::Retried => matches!(state, S::Dead | S::Cancelled | S::Expired),
        T::Deleted => matches!(state, S::Succeeded | S::Dead | S::Cancelled | S::Expired),
        T::Removed => {
            matches!(state, S::Unknown | S::Succeeded | S::Dead | S::Cancelled | S::Expired | S::Deleted | S::Damaged)
        }
    };
    (!can).then_some("the diagram has no such move")
}

fn never_group_asked(state: GroupState, input: GroupInput) -> Option<&'static str> {
    use GroupState::{Cancelled, Failed, Partial, Unknown};
    match (state, input) {
        (Partial | Failed | Cancelled, GroupInput::Create) => Some("an end other than success frees the key"),
        (Unknown, GroupInput::Create) => Some("with a group that is gone its key is free"),
        _ => None,
    }
}

fn never_group_turns(state: GroupState, turn: GroupTurn) -> Option<&'static str> {
    use GroupState as S;
    use GroupTurn as T;
    let can = match turn {
        T::Created => matches!(state, S::Unknown),
        T::Extended => matches!(state, S::Open | S::Damaged),
        T::Sealed => matches!(state, S::Open | S::Damaged),
        T::Stopped | T::ChildLetGo => matches!(state, S::Open | S::Sealed | S::Damaged),
        T::ChildSucceeded | T::ChildDead | T::ChildCancelled | T::ChildExpired => {
            matches!(state, S::Open | S::Sealed | S::Stopped | S::Damaged)
        }
        T::ChildRetried => matches!(state, S::Open | S::Sealed | S::Damaged),
        T::Finalized => matches!(state, S::Sealed | S::Stopped | S::Damaged),
    };
    (!can).then_some("the diagram has no such move")
}

fn never_slot_asked(state: SlotState, input: SlotInput) -> Option<&'static str> {
    use SlotInput::{Acquire, OldRefresh, OldRelease};
    match (state, input) {
        (SlotState::NoPool, OldRefresh | OldRelease) => Some("no grant is in force where there is no pool"),
        (SlotState::Declared, Acquire) => Some("who asks for a slot names no grant"),
        (SlotState::Declared, OldRefresh | OldRelease) => Some("by its grant alone it is known"),
        _ => None,
    }
}

impl Wish {
    /// Options of which a submit has one.
    fn group(self) -> usize {
        use Wish as W;
        let firsts = [
            W::NoKey,
            W::Interactive,
            W::AnyAttempts,
            W::AnyDeliveries,
            W::AnyAge,
            W::AnyLease,
            W::AnyRun,
            W::AnyProgress,
            W::NoDeadline,
            W::AnyRetention,
            W::AnyKeyTtl,
            W::AnyWhere,
            W::Cheap,
            W::OneReplica,
            W::Durable,
            W::Routed,
            W::Roomy,
            W::Batches,
        ];
        firsts.iter().filter(|first| **first <= self).count()
    }
}

fn never_wished(one: Wish, other: Wish) -> Option<&'static str> {
    match one.group().cmp(&other.group()) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => Some("of these a submit has one"),
        std::cmp::Ordering::Greater => Some("it is counted the other way round"),
    }
}

fn never_queue_asked(_state: QueueState, _input: QueueInput) -> Option<&'static str> {
    None
}

/// Whether a deed only comes after a fault took something out of the store.
pub fn mends(deed: Deed) -> bool {
    matches!(deed, Deed::Lose | Deed::Mend)
}

pub fn never_before(deed: Deed, blow: Blow) -> Option<&'static str> {
    match blow {
        Blow::Repeated => Some("what has not been applied is not done again"),
        Blow::ReplyLost | Blow::ReplyTwice => Some("a reply follows the commit"),
        Blow::Forgotten => Some("only what was applied can be forgotten"),
        Blow::StoreFull if !deed.grows() => Some("a full store refuses only what grows"),
        _ => None,
    }
}

pub fn never_after(deed: Deed, blow: Blow) -> Option<&'static str> {
    match blow {
        Blow::RequestLost | Blow::RequestLate | Blow::Refused | Blow::StoreDown | Blow::StoreFull => {
            Some("a request that is lost, late or refused has not been applied")
        }
        Blow::Forgotten if mends(deed) => Some("no regime both takes records and forgets commits"),
        _ => None,
    }
}

impl Deed {
    /// Whether a full store may refuse it: it adds work, or a large result.
    pub fn grows(self) -> bool {
        matches!(self, Deed::Submit | Deed::GroupCreate | Deed::GroupExtend | Deed::Succeed)
    }
}
