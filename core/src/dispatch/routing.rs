//! Upstreams and routes as a server is configured with them, as far as the core must know them.

use alloc::string::String;
use alloc::vec::Vec;

/// Which queues this cluster runs by itself, and where. Servers that share a store are given the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Routing {
    pub upstreams: Vec<Upstream>,
    pub routes: Vec<Route>,
    /// Tenants all of whose work is `on_prem`, whatever a job says.
    pub on_prem_tenants: Vec<String>,
}

/// A server that executes jobs when it is called.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Upstream {
    pub name: String,
    /// Whose slots its calls take; `None`: as many calls as there are jobs.
    pub pool: Option<String>,
    /// Where work marked `on_prem` may go.
    pub on_prem: bool,
}

/// One queue of some tenants, and the upstreams that may run its jobs, by name.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Route {
    pub queue: String,
    pub tenants: Vec<String>,
    pub upstreams: Vec<String>,
}

impl Routing {
    pub fn upstream(&self, name: &str) -> Option<&Upstream> {
        self.upstreams.iter().find(|u| u.name == name)
    }

    /// Whether a job of that tenant must stay on the premises, whatever it says itself.
    pub fn keeps(&self, tenant: &str) -> bool {
        self.on_prem_tenants.iter().any(|t| t == tenant)
    }

    /// The upstreams of the routes of a tenant's queue.
    pub fn of<'a>(&'a self, tenant: &'a str, queue: &'a str) -> impl Iterator<Item = &'a Upstream> {
        let routes = self.routes.iter().filter(move |r| r.queue == queue && r.tenants.iter().any(|t| t == tenant));
        routes.flat_map(|r| &r.upstreams).filter_map(|name| self.upstream(name))
    }

    /// Whether a job can be run by one of its queue's routes. A queue without routes is run by workers, who
    /// are where their operator put them.
    pub fn can_place(&self, tenant: &str, queue: &str, on_prem: bool) -> bool {
        !on_prem || self.of(tenant, queue).next().is_none() || self.of(tenant, queue).any(|u| u.on_prem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn on_prem_work_needs_a_route_that_stays_on_the_premises() {
        let upstream = |name: &str, on_prem| Upstream { name: name.into(), pool: None, on_prem };
        let route = |queue: &str, tenant: &str, upstreams: &[&str]| Route {
            queue: queue.into(),
            tenants: vec![tenant.into()],
            upstreams: upstreams.iter().map(|u| String::from(*u)).collect(),
        };
        let routing = Routing {
            upstreams: vec![upstream("here", true), upstream("cloud", false)],
            routes: vec![route("ocr", "a", &["cloud"]), route("ocr", "b", &["cloud"]), route("ocr", "b", &["here"])],
            on_prem_tenants: vec!["b".into()],
        };
        assert!(!routing.can_place("a", "ocr", true) && routing.can_place("a", "ocr", false));
        assert!(routing.can_place("b", "ocr", true));
        // Workers run it.
        assert!(routing.can_place("a", "text", true) && routing.can_place("c", "ocr", true));
        assert!(routing.keeps("b") && !routing.keeps("a"));
        assert_eq!(routing.of("b", "ocr").map(|u| u.name.as_str()).collect::<Vec<_>>(), ["cloud", "here"]);
    }
}
