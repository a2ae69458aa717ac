# SPDX-License-Identifier: Apache-2.0
"""What `allot scheduler` prints for others: kube-scheduler's configuration, the manifests."""

from allotment.cli.scheduler_options import LEASE, WEBHOOK, SchedulerOptions, namespaced

__all__ = ["configuration", "manifests"]


def configuration(options: SchedulerOptions) -> str:
    """Return a kube-scheduler configuration that asks this scheduler. Raises `UsageError`."""
    from allotment.metrics.serving import parse_address
    from allotment.scheduler.kube_configuration import (
        CLIENT_FILES,
        SERVER_FILES,
        kube_configuration,
    )
    from allotment.scheduler.settings_file import read_file_settings

    host, port = parse_address(options.listen)
    host = host if host not in {"", "0.0.0.0", "::"} else "127.0.0.1"  # noqa: S104 - not bound here
    tls = (
        CLIENT_FILES
        if options.client_secret
        else SERVER_FILES
        if options.tls_cert_file is not None
        else {}
    )
    if options.service != "off":
        namespace, name = namespaced(options.service, "a Service", LEASE)
        host = f"{name}.{namespace}.svc"
        # So that an address may stand in its place, where no name of a Service is known.
        tls = {"serverName": host, **tls} if tls else {}
    # None of them changes it, but what would be refused at the start is refused here.
    read_file_settings(options.dialects)
    return kube_configuration(
        host=host,
        port=port,
        tls=tls,
        scheduler=options.scheduler_name or "default-scheduler",
        has_plain_pods=options.plain_pods,
    )


def manifests(options: SchedulerOptions) -> str:
    """Return the webhook's configuration and the admission policies. Raises `UsageError`."""
    from allotment.dialects.systems import foreign_dialects
    from allotment.scheduler.admission_keys import all_keys
    from allotment.scheduler.admission_manifests import Installation, admission_objects, as_yaml
    from allotment.scheduler.settings_file import read_file_settings

    settings = read_file_settings(options.dialects)
    namespace, name = namespaced(options.webhook_service, "a Service", WEBHOOK)
    installed = Installation(
        namespace=namespace,
        service=name,
        configuration=options.webhook_configuration,
        ignored_namespaces=settings.webhook.ignored_namespaces,
    )
    keys = all_keys(foreign_dialects(settings.dialects))
    return as_yaml(admission_objects(keys, installed))
