package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"postrider/executor"
	"postrider/internal/record"
)

// Node is what a node is told to be.
type Node struct {
	DB      string
	Name    string // "": what the database says
	NewName string // of a database that is made, if Name is ""; "" too: none is made
	Topics  record.Topics

	Agents      []string // NAME=KIND:SPEC
	Procs       int      // of each exec agent; 0: one per core
	StepTimeout time.Duration
	Workers     int
	MaxAttempts int
	DeadLetter  bool
	MaxContinue int64
	MaxRecord   int
	DedupWindow time.Duration
	Routes      map[string]executor.Route // by agent
	routes      []string                  // AGENT=NODE[,best-effort]

	Inlets     record.Inlets // what the relay receives; without the node's name
	inletFlags inletFlags

	NoRelay  bool
	Broker   string // where the relay publishes
	Embedded string // where a broker of its own listens instead; with a fold in FoldDB
	FoldDB   string
	Listen   string // host:port of metrics, health and inputs; "": nowhere

	TokenFile string // with the token that whoever sends inputs has to show; "": none, and Listen is a loopback address
}

// Serve is `serve`; run runs the node.
func (a *App) Serve(run func(ctx context.Context, n Node) error) *cobra.Command {
	var n Node
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run a node: agents, and the relay that ships what they decided",
		Long: `Run the agents of one node over one database, which is made when it is missing, and ship what they decided to a broker.
The node's name is fixed with its first start; later it may be left out. One process at a time runs a database.

  --agent counter=exec:'python3 counter.py'   a child process that speaks JSON lines, started by sh -c
  --agent counter=go:counter                  compiled in

` + inputsHelp,
		Example: "  postrider serve --broker tcp://broker:1883 --node line-1 --agent counter=exec:'python3 counter.py'\n" +
			"  postrider serve --no-relay --node line-1 --agent counter=go:counter",
		Args: a.without(a.noArgs, "tenant"),
	}
	c.Flags().StringVar(&n.Broker, "broker", "", "`URL` of the broker: tcp://, mqtt://, tls://, ws://, wss:// or host:port")
	c.Flags().BoolVar(&n.NoRelay, "no-relay", false, "ship nothing; a relay of its own does")
	n.flags(c.Flags(), "`NAME` of the node, unique in its fleet; needed by the first start")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := n.check(c.Flags()); err != nil {
			return err
		}
		switch {
		case len(n.Agents) == 0:
			return WithHint(Usagef("--agent NAME=KIND:SPEC is missing"), "--agent counter=go:counter hosts the built-in sample")
		case n.NoRelay && n.Broker != "":
			return Usagef("--broker and --no-relay exclude each other")
		case !n.NoRelay && n.Broker == "":
			return WithHint(Usagef("--broker URL is missing"), "--no-relay runs the node without one; postrider relay ships then")
		case n.NoRelay && (c.Flags().Changed("public") || c.Flags().Changed("subscribe")):
			return WithHint(Usagef("--public and --subscribe are the relay's, which --no-relay leaves out"), "postrider relay takes them")
		}
		if err := known(n.Inlets, n.takes); err != nil {
			return err
		}
		n.DB = a.db
		return run(c.Context(), n)
	}
	return c
}

// Dev is `dev`; run runs the node.
func (a *App) Dev(run func(ctx context.Context, n Node) error) *cobra.Command {
	var n Node
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run a node with a broker and a fold of its own, for a developer machine",
		Long: `Run a node as serve does, together with an MQTT broker in the same process and a fold that counts what arrives. Databases
are made when they are missing: --db, and beside it one of the same name with .fold.db for the fold. The broker is open to
everybody who reaches its address, and forgets everything when it ends.

` + inputsHelp,
		Example: "  postrider dev --agent counter=exec:'python3 counter.py'\n  postrider dev --agent counter=go:counter --mqtt 127.0.0.1:0 --db /tmp/try.db",
		Args:    a.without(a.noArgs, "tenant"),
	}
	c.Flags().StringVar(&n.Embedded, "mqtt", "127.0.0.1:1883", "`ADDR` the broker listens on; port 0 takes a free one")
	n.flags(c.Flags(), "`NAME` of the node (default the host's name)")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := n.check(c.Flags()); err != nil {
			return err
		}
		if err := checkAddr("mqtt", n.Embedded); err != nil {
			return err
		}
		if _, port, _ := net.SplitHostPort(n.Listen); n.Listen == n.Embedded && port != "0" {
			return Usagef("--mqtt and --listen are one address: %s", n.Listen)
		}
		if len(n.Agents) == 0 {
			n.Agents = []string{"counter=go:counter"}
			a.Log.Info("no --agent was given; the built-in sample is hosted", "agent", n.Agents[0])
		}
		if err := known(n.Inlets, n.takes); err != nil {
			return err
		}
		n.DB, n.FoldDB = a.db, foldBeside(a.db)
		n.NewName = hostName()
		return run(c.Context(), n)
	}
	return c
}

const inputsHelp = `Inputs come from postrider send, and over HTTP on --listen, which answers once they are durable:

  curl -H 'Content-Type: application/json' -H 'Idempotency-Key: order-17' -d '{"hello": 1}' \
    http://127.0.0.1:8420/v1/tenants/default/agents/counter/runs/run-1/inputs

An address other than a loopback one takes --token-file FILE: one line of at least 16 characters, in a file that not
everybody can read. With it, inputs need the header 'Authorization: Bearer TOKEN'. Metrics and health never do.`

func (n *Node) flags(f *pflag.FlagSet, nodeUsage string) {
	f.SortFlags = false
	f.StringVar(&n.Name, "node", "", nodeUsage)
	f.StringArrayVar(&n.Agents, "agent", nil, "agent to host, `NAME=KIND:SPEC`; may be repeated")
	f.IntVar(&n.Procs, "agent-procs", 0, "processes of each exec agent, at most `N` (default one per core)")
	f.DurationVar(&n.StepTimeout, "step-timeout", 60*time.Second, "how long an exec agent may be silent in a step, `DURATION`")
	f.IntVar(&n.Workers, "workers", 64, "runs in hand at once, at most `N`")
	f.IntVar(&n.MaxAttempts, "max-attempts", 5, "failed attempts after which a step is exhausted, `N`")
	f.String("on-exhausted", "pause", "`WHAT` then: pause the run, or dead-letter its input")
	f.Int64Var(&n.MaxContinue, "max-continue", 10_000, "steps in a row without input, at most `N`; then the run is paused")
	f.IntVar(&n.MaxRecord, "max-record", 256<<10, "`BYTES` of data that one record may have")
	f.StringArrayVar(&n.routes, "route", nil, "where inputs for an agent go that is not hosted here, `AGENT=NODE`, or AGENT=NODE,best-effort; may be repeated")
	f.DurationVar(&n.DedupWindow, "dedup-window", 7*24*time.Hour, "how long ids of inputs are remembered, `DURATION`")
	n.inletFlags.flags(f)
	topicRoot(f, &n.Topics)
	f.StringVar(&n.Listen, "listen", "127.0.0.1:8420", "`ADDR` of metrics, health and inputs over HTTP; port 0 takes a free one, off is none")
	f.StringVar(&n.TokenFile, "token-file", "", "`FILE` with the token that inputs over HTTP then need; required where --listen is no loopback address")
}

func topicRoot(f *pflag.FlagSet, t *record.Topics) {
	f.StringVar(&t.Root, "topic-root", record.DefaultRoot, "`TOPIC` above all topics, the same for nodes and folds")
}

func listen(f *pflag.FlagSet, addr *string, ownDefault string) {
	f.StringVar(addr, "listen", ownDefault, "`ADDR` of metrics and health over HTTP; port 0 takes a free one, off is none")
}

// checkListen refuses what is no address, and turns off into "".
func checkListen(addr *string) error {
	if *addr == "off" {
		*addr = ""
		return nil
	}
	return checkAddr("listen", *addr)
}

// loopback reports whether an address that checkListen let through is for this machine's programs only.
func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	return host == "" || host == "localhost" || net.ParseIP(host).IsLoopback() // an empty one stands for 127.0.0.1
}

func checkAddr(flag, addr string) error {
	if addr == "" {
		return Usagef("--%s: an address is missing", flag)
	}
	if _, port, err := net.SplitHostPort(addr); err != nil {
		return Usagef("--%s: %q is not host:port", flag, addr)
	} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return Usagef("--%s: %q is not a port", flag, port)
	}
	return nil
}

// check refuses values that are out of range: 0 would mean a default further in.
func (n *Node) check(f *pflag.FlagSet) error {
	if n.Name != "" {
		if err := record.CheckName(n.Name); err != nil {
			return Usagef("--node: %w", err)
		}
	}
	if err := record.CheckRoot(n.Topics.Root); err != nil {
		return Usagef("--topic-root: %w", err)
	}
	if err := checkListen(&n.Listen); err != nil {
		return err
	}
	switch {
	case f.Changed("token-file") && n.TokenFile == "":
		return Usagef("--token-file: the name of a file is missing")
	case n.TokenFile == "" && n.Listen != "" && !loopback(n.Listen):
		return WithHint(Usagef("--listen %s is open to the network, which takes --token-file FILE", n.Listen),
			"(umask 077; head -c 24 /dev/urandom | base64 > FILE) makes one; --listen 127.0.0.1:8420 needs none")
	}
	for _, flag := range []struct {
		name  string
		value int64
		least int64
	}{
		{"agent-procs", int64(n.Procs), 0}, {"step-timeout", int64(n.StepTimeout), int64(time.Millisecond)}, {"workers", int64(n.Workers), 1},
		{"max-attempts", int64(n.MaxAttempts), 1}, {"max-continue", n.MaxContinue, 1}, {"max-record", int64(n.MaxRecord), 1},
		{"dedup-window", int64(n.DedupWindow), int64(time.Minute)},
	} {
		if flag.value < flag.least {
			value, least := f.Lookup(flag.name).Value, strconv.FormatInt(flag.least, 10)
			if value.Type() == "duration" {
				least = time.Duration(flag.least).String()
			}
			return Usagef("--%s: %s is too small, at least %s is allowed", flag.name, value, least)
		}
	}
	for _, r := range n.routes {
		if err := n.route(r); err != nil {
			return Usagef("--route %s: %w", r, err)
		}
	}
	var err error
	if n.Inlets, err = n.inletFlags.inlets(n.Topics); err != nil {
		return err
	}
	switch what := f.Lookup("on-exhausted").Value.String(); what {
	case "pause":
	case "dead-letter":
		n.DeadLetter = true
	default:
		return Usagef("--on-exhausted: %q is not pause or dead-letter", what)
	}
	return nil
}

// route takes in one --route.
func (n *Node) route(s string) error {
	agent, to, ok := strings.Cut(s, "=")
	to, quality, more := strings.Cut(to, ",")
	switch {
	case !ok:
		return errors.New("is not AGENT=NODE")
	case more && quality != "best-effort":
		return fmt.Errorf("%q is not best-effort, which is all that may follow a node", quality)
	case n.Routes[agent].Node != "":
		return fmt.Errorf("agent %s has a route already", agent)
	}
	if err := record.CheckName(agent); err != nil {
		return fmt.Errorf("agent %w", err)
	}
	if err := record.CheckName(to); err != nil {
		return fmt.Errorf("node %w", err)
	}
	if n.Routes == nil {
		n.Routes = map[string]executor.Route{}
	}
	n.Routes[agent] = executor.Route{Node: to, BestEffort: more}
	return nil
}

// takes says whether inputs for an agent have a place to go.
func (n *Node) takes(agent string) bool {
	_, routed := n.Routes[agent]
	return routed || slices.ContainsFunc(n.Agents, func(spec string) bool {
		name, _, _ := strings.Cut(spec, "=")
		return name == agent
	})
}
