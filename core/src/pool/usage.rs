//! How much of a pool is in use, and who waits for it, at one moment: what every grant is decided by.

use alloc::vec::Vec;

use super::record::Pool;
use super::{forsake, nobody, room};
use crate::job::record::Class;
use crate::job::sweep::trim;
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Draft};
use crate::store::{Clock, Guard, Slice, Span, UpTo, Version, keys};

/// What was read of a pool.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Usage {
    pub pool: Pool,
    pub version: Version,
    /// Holders, and those of class batch, by All and Live.
    holders: [u64; 2],
    batch: [u64; 2],
    /// Waiters of each class: all, and those for whom somebody is there.
    alive: Vec<(Class, [u64; 2])>,
    /// When the first of the holders will be past its time.
    pub next_end: Option<Clock>,
    /// The store could not be reached for a while, or this replica has just started: nobody's place is taken
    /// away before living holders and waiters had time to renew.
    pub sparing: bool,
}

/// The counts that [`Usage::new`] wants, in this order.
pub(crate) fn counts(pool: &str) -> impl Iterator<Item = (Name, Span)> {
    super::counted(pool).flat_map(|index| [(index.clone(), Span::All), (index, Span::Live)])
}

/// How many they are.
pub(crate) const COUNTS: usize = 2 * (2 + Class::ALL.len());

/// The first holder whose time has not come.
pub(crate) fn next_end(pool: &str, cx: &Cx<'_>) -> Slice {
    let after = Some((cx.clock, Name::from_static("\u{7f}")));
    Slice { index: keys::holders(pool), after, up_to: UpTo::End, limit: 1, give: Vec::new() }
}

impl Usage {
    /// `counts` as asked for by [`counts`].
    pub fn new(
        pool: Pool,
        version: Version,
        counts: &[u64],
        next_end: Option<Clock>,
        clock: Clock,
        cx: &Cx<'_>,
    ) -> Usage {
        let mut pairs = counts.chunks(2).map(|pair| match pair {
            [all, live] => [*all, *live],
            _ => [0, 0],
        });
        Usage {
            pool,
            version,
            holders: pairs.next().unwrap_or_default(),
            batch: pairs.next().unwrap_or_default(),
            alive: Class::ALL.into_iter().zip(pairs).collect(),
            next_end,
            sparing: clock < cx.spare_until,
        }
    }

    /// Room once what may be removed has been removed.
    pub fn room(&self, class: Class) -> u64 {
        let used = |[all, live]: [u64; 2]| if self.sparing { all } else { live };
        let free = |most: u32, counts| u64::from(most).saturating_sub(used(counts));
        let total = free(self.pool.total, self.holders);
        match class {
            Class::Batch => total.min(free(self.pool.most(class), self.batch)),
            Class::Interactive | Class::System => total,
        }
    }

    /// So much of it will have been taken by others in the same commit.
    pub fn take(&mut self, class: Class, cost: u32) {
        for used in &mut self.holders {
            *used += u64::from(cost);
        }
        if class == Class::Batch {
            for used in &mut self.batch {
                *used += u64::from(cost);
            }
        }
    }

    /// Those who wait in these classes and for whom somebody is there.
    pub fn waiters(&self, classes: impl Fn(Class) -> bool) -> u64 {
        self.alive.iter().filter(|(class, _)| classes(*class)).map(|(_, [_, live])| live).sum()
    }

    /// Those of a class who have a deadline, come or not.
    pub fn with_deadline(&self, class: Class) -> u64 {
        self.alive.iter().find(|(c, _)| *c == class).map_or(0, |(_, [all, _])| *all)
    }

    /// Those of a class for whom nobody is there any more.
    pub fn forsaken(&self, class: Class) -> u64 {
        self.alive.iter().filter(|(c, _)| *c == class).map(|(_, [all, live])| all - live).sum()
    }

    /// Removes what is past its time, so that its room and its places in line are free.
    pub fn tidy(&self, name: &str) -> Vec<Draft> {
        let mut drafts = Vec::new();
        if self.sparing {
            return drafts;
        }
        for (index, [all, live]) in [(keys::holders(name), self.holders), (keys::batch(name), self.batch)] {
            if all > live {
                drafts.push(trim(index, limits::TRIM));
            }
        }
        let forsaken = Class::ALL.into_iter().filter(|class| self.forsaken(*class) > 0);
        drafts.extend(forsaken.map(|class| forsake(name, class)));
        drafts
    }

    /// That the pool is as it was read, that nobody waits of whom `before` says that it comes first, and that
    /// there is room for so much more.
    pub fn guards(&self, name: &str, class: Class, cost: u32, before: impl Fn(Class) -> bool) -> Vec<Guard> {
        let mut guards = alloc::vec![Guard::At(keys::pool(name), self.version)];
        guards.extend(nobody(name, Class::ALL.into_iter().filter(|c| before(*c))));
        // limit-held: refused if another took the room meanwhile.
        guards.extend(room(name, &self.pool, class, cost));
        guards
    }
}
