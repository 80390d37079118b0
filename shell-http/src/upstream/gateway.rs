//! All upstreams and pools of this server, and slots for calls to a model.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use hyper::header::HOST;
use hyper::{Method, Request};
use leasehold_core::job::record::Class;
use leasehold_core::request::HoldUpstream;
use leasehold_core::{Failure, Request as Asked, Response as Answer};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::settings::{self, Health, Pool};
use super::slot::{self, Asking, Place, Slot, Wanted};
use super::{HOLD_MAX, Upstream, call};
use crate::body::Body;
use crate::driver::Driver;
use crate::wire::submit::TENANT;

/// Between two tries to set a pool while the store cannot be reached.
const SET_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks at what other servers were asked to leave alone.
const HOLDS_EVERY: Duration = Duration::from_secs(1);
/// Between two looks whether all pools of the configuration are there.
const POOLS_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Gateway {
    driver: Driver,
    pools: Vec<Pool>,
    pub upstreams: Vec<Arc<Upstream>>,
    pub routes: Vec<settings::Route>,
    /// Whatever the callers of the proxy send stays on the premises.
    on_prem: bool,
    /// Calls to upstreams are stopped from now on.
    ending: watch::Sender<bool>,
    ended: AtomicBool,
    /// Keepers of slots hold a sender each: when all are gone, the receiver knows.
    alive: Mutex<Option<mpsc::Sender<()>>>,
    all_gone: tokio::sync::Mutex<mpsc::Receiver<()>>,
}

/// A slot, and what waiting for it was like.
#[derive(Debug)]
pub struct Got {
    pub slot: Slot,
    /// Its place in line when it came; 0: it did not wait.
    pub position: u64,
}

impl Gateway {
    pub fn new(settings: &settings::Gateway, driver: Driver) -> Result<Gateway, String> {
        let upstreams = settings.upstreams.iter().cloned().map(|u| Upstream::new(u).map(Arc::new));
        let (alive, all_gone) = mpsc::channel(1);
        Ok(Gateway {
            driver,
            pools: settings.pools.clone(),
            upstreams: upstreams.collect::<Result<_, _>>()?,
            routes: settings.routes.clone(),
            on_prem: settings.on_prem_tenants.iter().any(|tenant| tenant == TENANT),
            ending: watch::Sender::new(false),
            ended: AtomicBool::new(false),
            alive: Mutex::new(Some(alive)),
            all_gone: tokio::sync::Mutex::new(all_gone),
        })
    }

    /// Sets the pools of the configuration, and looks after the health of upstreams from now on.
    pub fn start(self: &Arc<Self>) {
        let own = self.clone();
        tokio::spawn(async move {
            for pool in &own.pools {
                own.set(pool).await;
            }
            own.keep_pools().await;
        });
        if !self.routes.is_empty() {
            let own = self.clone();
            tokio::spawn(async move { own.heed_holds().await });
        }
        for upstream in &self.upstreams {
            if let Some(health) = upstream.settings.health.clone() {
                let (upstream, mut ending) = (upstream.clone(), self.ending.subscribe());
                tokio::spawn(async move {
                    tokio::select! {
                        () = look_after(&upstream, &health) => {}
                        _ = ending.wait_for(|e| *e) => {}
                    }
                });
            }
        }
    }

    /// Whom other servers were asked to leave alone, callers of this one's proxy leave alone as well.
    async fn heed_holds(&self) {
        while !self.ended.load(Ordering::Relaxed) {
            if let Ok(Answer::Upstreams(found)) = self.driver.ask(Asked::Upstreams).await {
                for view in found {
                    let left = view.held_until.map_or(0, |until| until.saturating_sub(view.at));
                    if left > 0
                        && let Some(upstream) = self.upstreams.iter().find(|u| u.name() == view.name)
                    {
                        upstream.hold(Duration::from_micros(left), std::time::Instant::now());
                    }
                }
            }
            sleep(HOLDS_EVERY).await;
        }
    }

    /// The upstream has asked a caller of the proxy to be left alone: no server calls it for so long. Where no
    /// job is ever sent there would be none to try it again, so there only this server heeds it.
    pub fn hold(&self, upstream: &Upstream, pause: Duration) {
        upstream.hold(pause, std::time::Instant::now());
        let name = upstream.name();
        if self.routes.iter().any(|route| route.upstreams.iter().any(|u| u == name)) {
            let for_ms = u64::try_from(pause.min(HOLD_MAX).as_millis()).unwrap_or(u64::MAX).max(1);
            let (driver, upstream) = (self.driver.clone(), name.to_owned());
            tokio::spawn(async move {
                // If it is not heard, the next that is sent there is told the same.
                let _ = driver.ask(Asked::HoldUpstream(HoldUpstream { upstream, for_ms })).await;
            });
        }
    }

    async fn set(&self, pool: &Pool) {
        let mut told = false;
        while !self.ended.load(Ordering::Relaxed) {
            match self.driver.ask(slot::set(pool)).await {
                Ok(_) => return,
                Err(failure) if !told => {
                    told = true;
                    tracing::warn!(pool = pool.name, code = failure.code(), "a pool could not be set yet");
                }
                Err(_) => {}
            }
            sleep(SET_AGAIN).await;
        }
    }

    /// A pool that has gone, with a store that was emptied or by somebody's call, comes back: the queues of its
    /// routes would stand still without a word.
    async fn keep_pools(&self) {
        while !self.pools.is_empty() && !self.ended.load(Ordering::Relaxed) {
            sleep(POOLS_EVERY).await;
            let Ok(Answer::Pools(found)) = self.driver.ask(Asked::Pools).await else { continue };
            for pool in self.pools.iter().filter(|pool| found.iter().all(|view| view.name != pool.name)) {
                tracing::warn!(pool = pool.name, "a pool of the configuration was missing and is set anew");
                self.set(pool).await;
            }
        }
    }

    /// Whether some are admitted to a pool while the store cannot be reached.
    pub fn may_fail_open(&self) -> bool {
        self.pools.iter().any(|pool| pool.fail_open.is_some())
    }

    /// The upstreams that have a model; `on_prem`: of those only.
    pub fn with_model(&self, model: &str, on_prem: bool) -> Vec<Arc<Upstream>> {
        let on_prem = on_prem || self.on_prem;
        let fits =
            |u: &&Arc<Upstream>| u.settings.models.iter().any(|m| m == model) && (u.settings.on_prem || !on_prem);
        self.upstreams.iter().filter(fits).cloned().collect()
    }

    /// A slot for a call to one of these upstreams: of the pool with most room, and if there is none, of the pool
    /// that has some first.
    pub async fn slot(
        &self,
        upstreams: &[Arc<Upstream>],
        holder: &str,
        wait: Duration,
        told: Option<mpsc::Sender<Place>>,
    ) -> Result<Got, Failure> {
        let pools = self.by_room(upstreams).await;
        let mut place: Option<Place> = None;
        let mut refused = Failure::UnknownPool;
        let mut full = Vec::new();
        for pool in pools {
            match self.ask(pool, holder, 0, None)?.await {
                Ok(slot) => return Ok(Got { slot, position: 0 }),
                Err(failure) => {
                    if let Failure::PoolFull { position, estimated_wait_ms, .. } = failure {
                        let here = Place { position, estimated_wait_ms };
                        place = Some(place.map_or(here, |p| if p.position <= position { p } else { here }));
                        full.push(pool);
                    }
                    refused = failure;
                }
            }
        }
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).min(leasehold_core::limits::WAIT_MS);
        let Some(place) = place.filter(|_| wait_ms > 0) else { return Err(refused) };
        if let Some(told) = &told {
            // The channel has room for the first.
            let _ = told.try_send(place);
        }
        let asked = full.into_iter().map(|pool| self.ask(pool, holder, wait_ms, told.clone()));
        let slot = first(asked.collect::<Result<_, _>>()?).await?;
        Ok(Got { slot, position: place.position })
    }

    fn ask(
        &self,
        pool: &Pool,
        holder: &str,
        wait_ms: u64,
        told: Option<mpsc::Sender<Place>>,
    ) -> Result<Asking, Failure> {
        let alive = self.alive().ok_or(Failure::Draining { retry_after_ms: 1_000 })?;
        let class = Class::Interactive;
        let wanted = Wanted { pool: pool.clone(), class, cost: 1, holder: holder.to_owned(), wait_ms, told };
        Ok(slot::ask(self.driver.clone(), wanted, alive))
    }

    /// Held by whoever has something to give back before this ends; `None`: it has ended.
    pub fn alive(&self) -> Option<mpsc::Sender<()>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The pools of these upstreams, those with most room first.
    async fn by_room(&self, upstreams: &[Arc<Upstream>]) -> Vec<&Pool> {
        let of = |pool: &&Pool| upstreams.iter().any(|u| u.settings.pool == pool.name);
        let mut pools: Vec<(u64, &Pool)> = self.pools.iter().filter(of).map(|pool| (0, pool)).collect();
        if pools.len() > 1 {
            for (room, pool) in &mut pools {
                let request = Asked::Pool { tenant: TENANT.into(), pool: pool.name.clone() };
                if let Ok(Answer::Pool(view)) = self.driver.ask(request).await {
                    *room = u64::from(view.total).saturating_sub(view.in_use);
                }
            }
            pools.sort_by_key(|(room, _)| std::cmp::Reverse(*room));
        }
        pools.into_iter().map(|(_, pool)| pool).collect()
    }

    /// Returns when calls to upstreams must stop.
    pub async fn ended(&self) {
        // The sender lives as long as this.
        let _ = self.ending.subscribe().wait_for(|e| *e).await;
    }

    /// Stops the calls that are under way, and waits until their slots have been given back.
    pub async fn end(&self, by: Instant) {
        self.ended.store(true, Ordering::Relaxed);
        self.ending.send_replace(true);
        drop(self.alive.lock().unwrap_or_else(PoisonError::into_inner).take());
        let mut all_gone = self.all_gone.lock().await;
        if timeout_at(by, all_gone.recv()).await.is_err() {
            tracing::warn!("slots could not be given back: they end by themselves");
        }
    }
}

/// The first that gets a slot, else the last failure. The others are withdrawn.
async fn first(mut asked: Vec<Asking>) -> Result<Slot, Failure> {
    let mut refused = Failure::UnknownPool;
    poll_fn(|cx| {
        let mut n = 0;
        while n < asked.len() {
            match Pin::new(&mut asked[n]).poll(cx) {
                Poll::Ready(Ok(slot)) => return Poll::Ready(Ok(slot)),
                Poll::Ready(Err(failure)) => {
                    refused = failure;
                    asked.swap_remove(n);
                }
                Poll::Pending => n += 1,
            }
        }
        if asked.is_empty() { Poll::Ready(Err(refused.clone())) } else { Poll::Pending }
    })
    .await
}

/// Asks an upstream now and then whether it is well.
async fn look_after(upstream: &Arc<Upstream>, health: &Health) {
    loop {
        sleep(health.every).await;
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::GET;
        let base = &upstream.settings.base;
        let (Ok(uri), Ok(host)) = (format!("{}{}", base.prefix, health.path).parse(), base.authority.parse()) else {
            return;
        };
        *request.uri_mut() = uri;
        request.headers_mut().insert(HOST, host);
        for header in &upstream.settings.headers {
            request.headers_mut().insert(header.name.clone(), header.value.clone());
        }
        let asked = timeout(health.every, call::send(upstream, request, None)).await;
        upstream.set_well(matches!(asked, Ok(Ok(answer)) if answer.head.status.is_success()));
    }
}
