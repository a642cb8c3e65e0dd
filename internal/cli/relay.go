package cli

import (
	"context"

	"github.com/spf13/cobra"

	"postrider/internal/record"
)

// Relay is what a relay process is told.
type Relay struct {
	DB     string
	Broker string
	Topics record.Topics
	Inlets record.Inlets // what it receives; without the node's name
	Listen string        // host:port of metrics and health; "": nowhere
}

// Relay is `relay`; run ships.
func (a *App) Relay(run func(ctx context.Context, r Relay) error) *cobra.Command {
	var r Relay
	var in inletFlags
	c := &cobra.Command{
		Use:   "relay",
		Short: "Ship a node's records and receive its inputs, as a process of its own",
		Long: `Ship the records of a node to a broker and take in what comes for it, beside serve --no-relay or while the node is stopped.
Of several relays of one database, one works and the others wait until it ends.`,
		Example: "  postrider relay --broker tcp://broker:1883 --db /var/lib/postrider/line-1.db",
		Args:    a.without(a.noArgs, "tenant"),
	}
	c.Flags().StringVar(&r.Broker, "broker", "", "`URL` of the broker: tcp://, mqtt://, tls://, ws://, wss:// or host:port (required)")
	in.flags(c.Flags())
	topicRoot(c.Flags(), &r.Topics)
	listen(c.Flags(), &r.Listen, "127.0.0.1:8421")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := record.CheckRoot(r.Topics.Root); err != nil {
			return Usagef("--topic-root: %w", err)
		}
		if err := checkListen(&r.Listen); err != nil {
			return err
		}
		if r.Broker == "" {
			return Usagef("--broker URL is missing")
		}
		var err error
		if r.Inlets, err = in.inlets(r.Topics); err != nil {
			return err
		}
		r.DB = a.db
		return run(c.Context(), r)
	}
	return c
}
