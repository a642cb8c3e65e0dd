package cli

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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

	NoRelay  bool
	Broker   string // where the relay publishes
	Embedded string // where a broker of its own listens instead; with a fold in FoldDB
	FoldDB   string
	Listen   string // host:port of metrics and health; "": nowhere
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
  --agent counter=go:counter                  compiled in`,
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
everybody who reaches its address, and forgets everything when it ends.`,
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
		n.DB, n.FoldDB = a.db, foldBeside(a.db)
		n.NewName = hostName()
		return run(c.Context(), n)
	}
	return c
}

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
	topicRoot(f, &n.Topics)
	listen(f, &n.Listen, "127.0.0.1:8420")
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
	for _, flag := range []struct {
		name  string
		value int64
		least int64
	}{
		{"agent-procs", int64(n.Procs), 0}, {"step-timeout", int64(n.StepTimeout), int64(time.Millisecond)}, {"workers", int64(n.Workers), 1},
		{"max-attempts", int64(n.MaxAttempts), 1}, {"max-continue", n.MaxContinue, 1}, {"max-record", int64(n.MaxRecord), 1},
	} {
		if flag.value < flag.least {
			return Usagef("--%s: %s is too small", flag.name, f.Lookup(flag.name).Value)
		}
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
